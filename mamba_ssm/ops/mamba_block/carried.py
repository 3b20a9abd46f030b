"""A Mamba block whose sequence lies on several devices: the operators' kernels, and between them what parts pass to
each other. The convolution's output and delta are kept for backward, not computed again.

Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt, W width of the convolution.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops.carry import Neighbours, nothing_passed_on
from mamba_ssm.ops.causal_conv1d.backward import launch_backward as launch_convolution_backward
from mamba_ssm.ops.causal_conv1d.forward import launch_forward as launch_convolution
from mamba_ssm.ops.mamba_block.arguments import (
    Inputs,
    Kept,
    Options,
    Sizes,
    channel_major,
    channels,
    check,
    conv_inputs,
    convolve,
    delta_of,
    scan_inputs,
)
from mamba_ssm.ops.mamba_block.backward import Gradients, finish_backward, out_proj_backward, scan_backward
from mamba_ssm.ops.mamba_block.block import BlockInputs, inner_inputs
from mamba_ssm.ops.mamba_block.projections import from_columns, project_in
from mamba_ssm.ops.selective_scan.carry import launch_carry, shape_of
from mamba_ssm.ops.selective_scan.forward import Results as ScanResults
from mamba_ssm.ops.selective_scan.forward import launch_forward as launch_scan

_OPTIONS = Options(delta_softplus=True, rms_eps=0.0, checkpoint_lvl=0)


class Carried(typing.NamedTuple):
    """What forward keeps for backward beside the operator's inputs. All but checkpoints and states are matrices."""

    x_dbl: torch.Tensor  # (R + N + N, B*L)
    checkpoints: torch.Tensor | None  # the scan's, with keep
    conv_out: torch.Tensor  # (D, B*L)
    delta: torch.Tensor  # (D, B*L)
    inputs_before: torch.Tensor  # of the convolution, (B, D, W-1)
    state: torch.Tensor | None  # before the part, (B, D N)


def part_forward(
    block: BlockInputs, dtype: torch.dtype | None, keep: bool, neighbours: Neighbours
) -> tuple[torch.Tensor, Inputs, Carried]:
    """The part's output (B, L, d_model), and the operator's inputs and what else part_backward needs.

    block: with projections of float32 parameters under autocast, whose dtype is then given. keep: for part_backward.
    """
    hidden_states, weight = block.hidden_states, block.in_proj_weight
    if dtype is not None:
        hidden_states, weight = checks.cast(hidden_states, dtype), checks.cast(weight, dtype)
    xz = project_in(hidden_states, weight, block.in_proj_bias)
    dim = xz.shape[1] // 2
    neighbours.send_inputs(xz[:, :dim], block.conv1d_weight.shape[2] - 1)
    inputs = inner_inputs(xz, block, dtype)
    sizes = check(inputs)
    before = neighbours.inputs_before()
    conv_out = xz.new_empty((dim, 0)) if sizes.columns == 0 else _convolve(xz, inputs, sizes, before)
    x_dbl = torch.mm(inputs.x_proj_weight, conv_out)
    delta = delta_of(x_dbl, inputs, sizes, _OPTIONS.rms_eps)
    B, C = (channels(x_dbl, sizes, sizes.rank + first) for first in (0, sizes.dstate))
    scan = scan_inputs(conv_out, delta, B, C, xz, inputs, sizes)
    carry = launch_carry(sizes.scan, scan, _OPTIONS.scan)
    state = neighbours.state_before(carry.passed_on, carry.shape)
    y = torch.empty_like(conv_out)
    checkpoints = inputs.A.new_empty((sizes.scan.checkpoints,)) if keep else None
    if sizes.columns:
        results = ScanResults(channels(y, sizes), None, checkpoints)
        launch_scan(sizes.scan, scan._replace(initial_state=state), _OPTIONS.scan, results, carry)
    out = F.linear(y.t(), inputs.out_proj_weight, inputs.out_proj_bias).view(sizes.batch, sizes.seqlen, sizes.d_model)
    return out, inputs, Carried(x_dbl, checkpoints, conv_out, delta, before, state)


def part_backward(dout: torch.Tensor, inputs: Inputs, kept: Carried, neighbours: Neighbours) -> Gradients:
    """The operator's gradients, that of the part's output given."""
    sizes = check(inputs)
    xz, rows = channel_major(inputs.xz, sizes), dout.reshape(sizes.columns, sizes.d_model)
    dxz = xz.new_empty((2 * sizes.dim, sizes.columns))
    dx = from_columns(dxz[: sizes.dim], sizes.batch, sizes.seqlen)
    if sizes.columns == 0:
        shape = shape_of(sizes.scan)
        neighbours.gradient_after(nothing_passed_on(shape, inputs.A), shape)
        neighbours.add_input_gradients(torch.zeros_like(kept.inputs_before), dx)
        zeros: typing.Any = (None if tensor is None else torch.zeros_like(tensor) for tensor in inputs)
        return Gradients(*zeros)

    def gradient_after(scan: typing.Any, dy: typing.Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        carry = launch_carry(sizes.scan, scan, _OPTIONS.scan, dy)
        return neighbours.gradient_after(carry.passed_on, carry.shape), carry.workspace

    dy = torch.mm(inputs.out_proj_weight.t(), rows.t())
    of_scan = Kept(kept.x_dbl, kept.checkpoints, kept.conv_out, kept.delta)
    states = {"state": kept.state, "after": gradient_after}
    pending = scan_backward(dy, xz, inputs, of_scan, _OPTIONS, sizes, dxz, **states)
    del dy
    of_out_proj = out_proj_backward(rows, dxz[: sizes.dim], inputs.out_proj_bias)
    dbefore = torch.empty_like(kept.inputs_before)

    def convolution_backward(
        of_all: typing.Any, du: typing.Any, _: None, conv: typing.Any, *others: typing.Any, add: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As _convolve: with no gradient from the first steps, and then of these alone."""
        of_first = _first_steps(sizes)
        first = from_columns(pending.du, sizes.batch, sizes.seqlen)[..., : of_first.seqlen]
        dout = first.clone(memory_format=torch.contiguous_format)
        first.zero_()
        of_rest = launch_convolution_backward(of_all, du, None, conv, *others)
        conv = conv._replace(initial_states=kept.inputs_before)
        dx_first = torch.empty_like(dout)
        of_these = launch_convolution_backward(of_first, dout, None, conv, _OPTIONS.conv1d, dx_first, dbefore)
        dx[..., : of_first.seqlen] += dx_first
        (dweight, dbias), (dweight_first, dbias_first) = of_rest, of_these
        return dweight + dweight_first, None if dbias is None else dbias + dbias_first

    grads = finish_backward(
        pending, of_out_proj, xz, inputs, _OPTIONS, sizes, dxz, convolution_backward=convolution_backward
    )
    neighbours.add_input_gradients(dbefore, dx)
    return grads


def _first_steps(sizes: Sizes) -> typing.Any:
    """The convolution's sizes, of the steps that see inputs before the part."""
    return sizes.conv1d._replace(seqlen=min(sizes.width - 1, sizes.seqlen))


def _convolve(xz: torch.Tensor, inputs: Inputs, sizes: Sizes, before: torch.Tensor) -> torch.Tensor:
    """As if nothing came before, which the kernels do faster, and then the first steps again, from what does."""
    out = convolve(xz, inputs, sizes, _OPTIONS)
    conv = conv_inputs(xz, inputs, sizes)._replace(initial_states=before)
    launch_convolution(_first_steps(sizes), conv, _OPTIONS.conv1d, channels(out, sizes), None)
    return out
