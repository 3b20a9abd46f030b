"""The convolution forward, backward and one step at a time, without autograd."""

import torch

from mamba_ssm.ops.causal_conv1d.extension import Targets, backward, forward, update


def causal_conv1d_fwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_states_out: torch.Tensor | None,
    silu_activation: bool,
) -> torch.Tensor:
    """The output; the last W-1 inputs go into final_states_out."""
    return forward(x, weight, bias, seq_idx, initial_states, None, final_states_out, silu_activation)


def causal_conv1d_bwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dx: torch.Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias, dinitial_states); dx is the given tensor if there is one."""
    options = return_dinitial_states, silu_activation
    tensors = x, weight, bias, dout, seq_idx, initial_states, dfinal_states
    return backward(*tensors, *options, Targets(dx))


def causal_conv1d_update_function(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    """The output; conv_state is written in place."""
    return update(x, conv_state, weight, bias, None, silu_activation, cache_seqlens, conv_state_indices)
