"""causal_conv1d_fn and causal_conv1d_update, with their references, in the order of arguments of causal-conv1d."""

import torch

from mamba_ssm._upstream import AutogradFunction
from mamba_ssm.ops import causal_conv1d as ours


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | str | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """mamba_ssm.ops.causal_conv1d.causal_conv1d_fn. In fourth place causal-conv1d 1.0 has the activation."""
    if isinstance(seq_idx, str):
        seq_idx, activation = None, seq_idx
    return ours.causal_conv1d_fn(
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation
    )


class CausalConv1dFn(AutogradFunction):
    """causal_conv1d_fn by the name of causal-conv1d's autograd.Function."""

    apply = staticmethod(causal_conv1d_fn)
    gradients = 8


causal_conv1d_update = ours.causal_conv1d_update
causal_conv1d_update_ref = ours.causal_conv1d_update_ref


def causal_conv1d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same as causal_conv1d_fn in plain torch, with seq_idx in last place."""
    return ours.causal_conv1d_ref(
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation
    )
