"""What the package causal_conv1d calls: the convolution without autograd, with results in tensors that may be given."""

import typing
from functools import partial

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import call
from mamba_ssm.ops.causal_conv1d.arguments import NAME
from mamba_ssm.ops.causal_conv1d.backward import Gradients, causal_conv1d_backward_op
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_op
from mamba_ssm.ops.causal_conv1d.update import causal_conv1d_update_op


class Targets(typing.NamedTuple):
    """Tensors that a caller gives for the gradients, in their order; None for one to be made."""

    dx: torch.Tensor | None = None
    dweight: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    dinitial_states: torch.Tensor | None = None


@torch.no_grad()
def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    out: torch.Tensor | None,
    final_states: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """The output, in `out` if that is given; the last W-1 inputs go into final_states."""
    options = final_states is not None, bool(silu), False
    results = call(causal_conv1d_op, x, weight, bias, seq_idx, initial_states, *options)
    checks.into(NAME, "final_states", final_states, results[1])
    return checks.into(NAME, "out", out, results[0])


@torch.no_grad()
def update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    silu: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    """The output, in `out` if that is given; conv_state is written in place."""
    arguments = x, conv_state, weight, bias, cache_seqlens, conv_state_indices, bool(silu)
    return checks.into(NAME, "out", out, call(causal_conv1d_update_op, *arguments))


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    return_dinitial_states: bool,
    silu: bool,
    targets: Targets,
) -> Gradients:
    """The gradients. They replace what the targets held."""
    inputs = x, weight, bias, seq_idx, initial_states
    options = bool(return_dinitial_states), bool(silu), False
    grads = call(causal_conv1d_backward_op, dout, dfinal_states, *inputs, *options)
    return Gradients(*map(partial(checks.into, NAME), Gradients._fields, targets, grads))
