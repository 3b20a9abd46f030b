"""The convolution forward, backward and one step at a time, without autograd."""

import torch

from mamba_ssm.ops.causal_conv1d.extension import Targets, backward, forward, update

# What causal-conv1d calls its operators' library. Here they are torch.ops.mamba_ssm's.
LIBRARY_NAME = "DaoAILab"


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


# ---- into tensors that the caller gives ------------------------------------------------------------------------------


def _causal_conv1d_fwd_cpp(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    final_states_out: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Writes the output into out, and the last W-1 inputs into final_states_out."""
    forward(x, weight, bias, seq_idx, initial_states, out, final_states_out, silu_activation)


def _causal_conv1d_bwd_cpp(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dbias: torch.Tensor | None,
    dinitial_states: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Writes the gradients into dx, dweight, dbias and dinitial_states, in place of what they held."""
    tensors = x, weight, bias, dout, seq_idx, initial_states, dfinal_states
    targets = Targets(dx, dweight, dbias, dinitial_states)
    backward(*tensors, dinitial_states is not None, silu_activation, targets)


def _causal_conv1d_update_cpp(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> None:
    """Writes the output into out; conv_state is written in place."""
    update(x, conv_state, weight, bias, out, silu_activation, cache_seqlens, conv_state_indices)
