"""The inside of a Mamba-2 block whose sequence lies on several devices: the fused operators' kernels, and between them
what parts pass to each other. The convolution's output and the step sizes are kept for backward, not computed again.

Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate, W width of the convolution.
"""

import typing

import torch

from mamba_ssm._torch import make
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.carry import Neighbours, nothing_passed_on, passed_on, reaching
from mamba_ssm.ops.causal_conv1d.backward import launch_backward as launch_convolution_backward
from mamba_ssm.ops.causal_conv1d.forward import launch_forward as launch_convolution
from mamba_ssm.ops.mamba2_block.arguments import (
    Inputs,
    Kept,
    Options,
    Sizes,
    channels_first,
    check,
    conv_inputs,
    cut,
    cut_xBC,
    heads,
    kernel_layout,
    mlp,
    scan_inputs,
)
from mamba_ssm.ops.mamba2_block.backward import (
    Gradients,
    Wanted,
    allocate,
    gate_backward,
    norm_backward,
    of_nothing,
    with_convolution,
)
from mamba_ssm.ops.mamba2_block.forward import launch_gated_norm
from mamba_ssm.ops.norm.swiglu import launch_backward as launch_swiglu_backward
from mamba_ssm.ops.norm.swiglu import launch_forward as launch_swiglu
from mamba_ssm.ops.ssd import carry
from mamba_ssm.ops.ssd.backward import Gradients as ScanGradients
from mamba_ssm.ops.ssd.backward import launch_backward as launch_scan_backward
from mamba_ssm.ops.ssd.forward import launch_forward as launch_scan


class Carried(typing.NamedTuple):
    """What forward keeps for backward beside the inputs, None where it is not needed."""

    y: torch.Tensor | None  # with a norm: the scan's output (B, L, H P), and 1 / rms of each group (B, L, G) float32
    rstd: torch.Tensor | None
    conv_out: torch.Tensor | None  # (B, L, H P + 2 G N)
    inputs_before: torch.Tensor
    steps: torch.Tensor  # of ops/ssd/carry.py
    states: torch.Tensor | None  # before each piece


def part_forward(inputs: Inputs, options: Options, gate: bool, neighbours: Neighbours) -> tuple[torch.Tensor, Carried]:
    """The part's output (B, L, d_mlp + H P), and what part_backward needs.

    inputs, options: as of the operators, with dt_bias and A_log, float32; without states, seq_idx and reverse.
    gate: False for the scan's output alone (B, L, H P), without norm, gate and gated MLP.
    """
    sizes = check(inputs, options)
    shape = torch.Size(sizes.states)
    inputs, row_stride = kernel_layout(inputs, options.reverse)
    zxbcdt = inputs.zxbcdt
    neighbours.send_inputs(_conv_input(zxbcdt, sizes), sizes.width - 1)
    z, xBC, _ = cut(zxbcdt, row_stride, sizes)
    pieces = carry.cut_length(sizes)
    dt = zxbcdt.narrow(2, zxbcdt.shape[2] - sizes.nheads, sizes.nheads)
    steps = carry.steps_of(dt, typing.cast(torch.Tensor, inputs.dt_bias), options, pieces)
    factors = carry.factors_of(steps, -torch.exp(inputs.A))
    before = neighbours.inputs_before()
    out = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.d_mlp + sizes.dim if gate else sizes.dim))
    if sizes.empty:
        neighbours.state_before(nothing_passed_on(shape, inputs.A), shape)
        return out, Carried(None, None, None, before, steps, None)

    conv_out = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.channels))
    conv = conv_inputs(xBC, inputs)._replace(initial_states=before)
    launch_convolution(sizes.conv1d, conv, options.conv1d, channels_first(conv_out, sizes), None)
    scan = _scan(conv_out, row_stride, inputs, pieces)
    passed = carry.last_states(pieces, scan, options).view(*factors.shape, -1)
    before_part = neighbours.state_before(passed_on(passed, factors), shape)
    states = reaching(passed, factors, before_part).view(pieces.states)
    scan = scan._replace(initial_states=states)
    y = rstd = None
    if gate and sizes.d_mlp:
        launch_swiglu(mlp(zxbcdt, sizes), out.narrow(2, 0, sizes.d_mlp))
    if gate and inputs.rmsnorm_weight is not None:
        y = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
        rstd = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.ngroups), dtype=torch.float32)
        launch_scan(pieces, scan, options, heads(y, pieces), None)
        launch_gated_norm(y, (z, row_stride), inputs, options, sizes, out, rstd)
    else:
        if gate:
            scan = scan._replace(z=cut(zxbcdt, row_stride, pieces)[0])
        launch_scan(pieces, scan, options, heads(out, pieces, out.shape[2] - sizes.dim), None)
    return out, Carried(y, rstd, conv_out, before, steps, states)


def part_backward(
    dout: torch.Tensor, inputs: Inputs, kept: Carried, options: Options, gate: bool, neighbours: Neighbours
) -> Gradients:
    """The operators' gradients, that of the part's output given."""
    sizes = check(inputs, options)
    shape = torch.Size(sizes.states)
    inputs, row_stride = kernel_layout(inputs, options.reverse)
    grads = allocate(dout, inputs, sizes, Wanted(need_dinitial_states=False, recompute_out=False))
    dconv_input = _conv_input(grads.dzxbcdt, sizes)
    if sizes.empty:
        neighbours.gradient_after(nothing_passed_on(shape, inputs.A), shape)
        neighbours.add_input_gradients(torch.zeros_like(kept.inputs_before), dconv_input)
        return Gradients(*of_nothing(inputs, sizes, None, grads))

    pieces = carry.cut_length(sizes)
    conv_out = typing.cast(torch.Tensor, kept.conv_out)
    z, xBC, _ = cut(inputs.zxbcdt, row_stride, sizes)
    dz, dxBC, _ = cut(grads.dzxbcdt, grads.dzxbcdt.shape[2], sizes)
    scan = _scan(conv_out, row_stride, inputs._replace(initial_states=kept.states), pieces)
    dy = dout.contiguous()
    if not gate:
        grads.dzxbcdt.narrow(2, 0, 2 * sizes.d_mlp + sizes.dim).zero_()
    elif kept.y is not None:
        dy = norm_backward(dout, Kept(kept.y, kept.rstd), z, dz, inputs, options, sizes, grads)
    else:
        y = dout.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
        launch_scan(pieces, scan, options, heads(y, pieces), None)
        dy = gate_backward(dout, y, inputs, sizes, grads)
    if gate and sizes.d_mlp:
        dmlp = dout.narrow(2, 0, sizes.d_mlp)
        launch_swiglu_backward(dmlp, mlp(inputs.zxbcdt, sizes), mlp(grads.dzxbcdt, sizes), None)

    decays = carry.decays_of(kept.steps, -torch.exp(inputs.A))
    factors = decays[..., -1]
    first = carry.first_gradients(pieces, heads(dy, pieces), scan.C, decays).view(*factors.shape, -1)
    after_part = neighbours.gradient_after(passed_on(first, factors, from_end=True), shape)
    after = reaching(first, factors, after_part, from_end=True).view(pieces.states)
    dconv_out = empty_like(conv_out)
    dx, dB, dC = cut_xBC(dconv_out, pieces)
    ddt = cut(grads.dzxbcdt, grads.dzxbcdt.shape[2], pieces)[2]
    scan_grads = make(ScanGradients, (dx, ddt, grads.dA, dB, dC, grads.dD, grads.ddt_bias, None))
    launch_scan_backward(pieces, heads(dy, pieces), after, scan, options, scan_grads)
    del dy  # held until here: the kernels have it now
    conv = conv_inputs(xBC, inputs)._replace(initial_states=kept.inputs_before)
    dbefore = torch.empty_like(kept.inputs_before)
    of_conv = channels_first(dconv_out, sizes), None, conv, options.conv1d, dxBC, dbefore
    dconv1d = launch_convolution_backward(sizes.conv1d, *of_conv)
    neighbours.add_input_gradients(dbefore, dconv_input)
    return Gradients(*with_convolution(grads, *dconv1d))


def _conv_input(zxbcdt: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """(B, H P + 2 G N, L), of zxbcdt or its gradient."""
    return zxbcdt.narrow(2, 2 * sizes.d_mlp + sizes.dim, sizes.channels).transpose(1, 2)


def _scan(conv_out: torch.Tensor, row_stride: int, inputs: Inputs, pieces: Sizes) -> typing.Any:
    """The inputs of the pieces' scan, as launchers take them."""
    dt = cut(inputs.zxbcdt, row_stride, pieces)[2]
    return scan_inputs(conv_out, dt, None, inputs, pieces)
