"""The backward operator of a Mamba block's inside: gradients of all its inputs.

The gradient of xz is one tensor: the scan writes its z rows, the convolution its x rows.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import autocast_state, define, returns, signature, unpack, use_deterministic_mode
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.carry import nothing_passed_on
from mamba_ssm.ops.causal_conv1d.backward import launch_backward as launch_convolution_backward
from mamba_ssm.ops.mamba_block.arguments import (
    Inputs,
    Kept,
    Options,
    channel_major,
    channels,
    check,
    conv_inputs,
    convolve,
    delta_of,
    first_steps,
    matrix_of,
    scan_inputs,
    sources,
)
from mamba_ssm.ops.mamba_block.projections import from_columns, rms_norm_channels_grad, to_columns
from mamba_ssm.ops.selective_scan.arguments import check_fake
from mamba_ssm.ops.selective_scan.backward import Gradients as ScanGradients
from mamba_ssm.ops.selective_scan.backward import launch_backward as launch_scan_backward
from mamba_ssm.ops.selective_scan.carry import launch_carry, shape_of

_NAME = "mamba_inner_backward"


class Gradients(typing.NamedTuple):
    """The operator's results, None for those of absent inputs."""

    dxz: torch.Tensor
    dconv1d_weight: torch.Tensor
    dconv1d_bias: torch.Tensor | None
    dx_proj_weight: torch.Tensor
    ddelta_proj_weight: torch.Tensor
    dout_proj_weight: torch.Tensor
    dout_proj_bias: torch.Tensor | None
    dA: torch.Tensor
    dB: torch.Tensor | None
    dC: torch.Tensor | None
    dD: torch.Tensor | None
    ddelta_bias: torch.Tensor | None
    dB_proj_bias: torch.Tensor | None
    dC_proj_bias: torch.Tensor | None
    db_rms_weight: torch.Tensor | None
    dc_rms_weight: torch.Tensor | None
    ddt_rms_weight: torch.Tensor | None


def of_inputs(grads):
    """The gradients under the names of their inputs, which stand in the same order."""
    return Inputs(*grads)


class _Rows(typing.NamedTuple):
    """Gradients of what makes B or C of its rows of x_dbl; the matrix' own, if it is given."""

    matrix: torch.Tensor | None
    proj_bias: torch.Tensor | None
    rms_weight: torch.Tensor | None


def _check(dout, inputs, kept):
    """Raises on tensors that do not fit; returns the sizes."""
    sizes, xz = check(inputs), inputs.xz
    columns = sizes.columns
    shape = (sizes.batch, sizes.seqlen, sizes.d_model)
    checks.check_same(_NAME, "dout", dout, shape, xz, "xz", "(B, L, d_model)")
    shape = (inputs.x_proj_weight.shape[0], columns)
    checks.check_same(_NAME, "x_dbl", kept.x_dbl, shape, xz, "xz", "(R + N + N, B * L)")
    letters = "(B * (L-1)//64 * D * N + 2,)"
    checks.check_float32(_NAME, "checkpoints", kept.checkpoints, (sizes.scan.checkpoints,), xz, "xz", letters)
    if (kept.conv_out is None) != (kept.delta is None):
        raise ValueError(f"{_NAME}: conv_out and delta go together, but one of them is None")
    if kept.conv_out is not None:
        shape = (sizes.dim, columns)
        checks.check_same(_NAME, "conv_out", kept.conv_out, shape, xz, "xz", "(D, B * L)")
        checks.check_same(_NAME, "delta", kept.delta, shape, xz, "xz", "(D, B * L)")
    return sizes


def _backward(dout, *arguments):
    inputs, kept, options = unpack(arguments, Inputs, Kept, Options)
    return gradients(dout, inputs, kept, options, _check(dout, inputs, kept))


def gradients(dout, inputs, kept, options, sizes, neighbours=None, before=None):
    """The operator's, on arguments that were checked. neighbours, before: those of scan_forward, of a part."""
    if sizes.columns == 0:
        if neighbours is not None:
            shape = shape_of(sizes.scan)
            neighbours.gradient_after(nothing_passed_on(shape, inputs.A), shape)
            dx = inputs.xz.new_empty((sizes.batch, sizes.dim, sizes.seqlen))
            neighbours.add_input_gradients(torch.zeros_like(before.inputs), dx)
        return Gradients(*(None if tensor is None else torch.zeros_like(tensor) for tensor in inputs))
    xz = channel_major(inputs.xz, sizes)
    dxz = xz.new_empty((2 * sizes.dim, sizes.columns))
    dout = dout.reshape(sizes.columns, sizes.d_model)
    dy = torch.mm(inputs.out_proj_weight.t(), dout.t())
    part = {"neighbours": neighbours, "before": before}
    pending = scan_backward(dy, xz, inputs, kept, options, sizes, dxz, **part)
    del dy
    of_out_proj = out_proj_backward(dout, dxz[: sizes.dim], inputs.out_proj_bias)
    return finish_backward(pending, of_out_proj, xz, inputs, options, sizes, dxz, **part)


class Pending(typing.NamedTuple):
    """What scan_backward leaves for finish_backward."""

    x_dbl: torch.Tensor
    conv_out: torch.Tensor
    dx_dbl: torch.Tensor  # its rows of B and C, where both come from it
    biased: tuple[torch.Tensor | None, torch.Tensor | None]  # B and C as their norms took them
    du: torch.Tensor  # of the convolution's output, but for what comes through x_proj
    ddelta: torch.Tensor
    grads: ScanGradients


def scan_backward(dy, xz, inputs, kept, options, sizes, dxz, add=False, neighbours=None, before=None):
    """The scan's part. In dxz (2D, B*L) it writes the gradient of z, and the scan's output where dx will come.

    add: with reverse, it adds to those of the other direction. neighbours, before: as gradients takes them.
    """
    eps = options.rms_eps
    x_dbl, checkpoints = kept.x_dbl.contiguous(), kept.checkpoints.contiguous()
    if kept.conv_out is None:
        conv_out = convolve(xz, inputs, sizes, options)
        delta = delta_of(x_dbl, inputs, sizes, eps).contiguous()
    else:
        conv_out, delta = kept.conv_out.contiguous(), kept.delta.contiguous()
    of_B, of_C = sources(inputs, sizes)
    both = of_B.given is None and of_C.given is None
    B, biased_B = matrix_of(of_B, x_dbl, sizes, eps, view=both)
    C, biased_C = matrix_of(of_C, x_dbl, sizes, eps, view=both)
    dx_dbl = empty_like(x_dbl)
    if both:
        dB, dC = channels(dx_dbl, sizes, of_B.first), channels(dx_dbl, sizes, of_C.first)
    else:
        dB, dC = empty_like(B), empty_like(C)
    du, ddelta = torch.empty_like(dy), torch.empty_like(dy)
    scan = scan_inputs(conv_out, delta, B, C, xz, inputs, sizes, None if before is None else before.state)
    dlast_state = carried = None
    if neighbours is not None:
        carry = launch_carry(sizes.scan, scan, options.scan, channels(dy, sizes))
        dlast_state, carried = neighbours.gradient_after(carry.passed_on, carry.shape), carry.workspace
    grads = ScanGradients(
        channels(du, sizes),
        channels(ddelta, sizes),
        empty_like(inputs.A),
        dB,
        dC,
        None if inputs.D is None else empty_like(inputs.D),
        channels(dxz, sizes, sizes.dim),
        None if inputs.delta_bias is None else empty_like(inputs.delta_bias),
        dinitial_state=None,
        out=channels(dxz, sizes),
    )
    given = channels(dy, sizes), dlast_state, scan, checkpoints, options.scan
    launch_scan_backward(sizes.scan, *given, grads, carried, add=add)
    return Pending(x_dbl, conv_out, dx_dbl, (biased_B, biased_C), du, ddelta, grads)


def out_proj_backward(dout, y, bias):
    """Gradients of the output projection, weight and bias, from dout (B*L, d_model) and its input y (D, B*L)."""
    return torch.mm(dout.t(), y.t()), None if bias is None else dout.sum(0)


def finish_backward(pending, of_out_proj, xz, inputs, options, sizes, dxz, add=False, neighbours=None, before=None):
    """All gradients; writes dx into dxz, or adds it to what is there. neighbours, before: as gradients takes them."""
    x_dbl, conv_out, dx_dbl, (biased_B, biased_C), du, ddelta, grads = pending
    batch, seqlen, rank, eps = sizes.batch, sizes.seqlen, sizes.rank, options.rms_eps
    dt, ddt_rms_weight = x_dbl[:rank], None
    if inputs.dt_rms_weight is not None:
        projected = from_columns(torch.mm(inputs.delta_proj_weight, dt), batch, seqlen)
        ddelta = from_columns(ddelta, batch, seqlen)
        ddelta, ddt_rms_weight = rms_norm_channels_grad(ddelta, projected, inputs.dt_rms_weight, eps)
        ddelta = to_columns(ddelta)
    ddelta_proj_weight = torch.mm(ddelta, dt.t())
    torch.mm(inputs.delta_proj_weight.t(), ddelta, out=dx_dbl[:rank])
    of_B, of_C = sources(inputs, sizes)
    both = of_B.given is None and of_C.given is None
    rows_of_B = _finish_rows(of_B, dx_dbl, sizes, None if both else grads.dB, biased_B, eps)
    rows_of_C = _finish_rows(of_C, dx_dbl, sizes, None if both else grads.dC, biased_C, eps)
    dx_proj_weight = torch.mm(dx_dbl, conv_out.t())
    du.addmm_(inputs.x_proj_weight.t(), dx_dbl)  # du is the convolution's whole gradient from here on
    conv = conv_inputs(xz, inputs, sizes)
    if neighbours is None:
        given = channels(du, sizes), None, conv, options.conv1d, channels(dxz, sizes), None
        dconv1d_weight, dconv1d_bias = launch_convolution_backward(sizes.conv1d, *given, add=add)
    else:
        given = du, conv, options.conv1d, sizes, dxz, neighbours, before.inputs
        dconv1d_weight, dconv1d_bias = _convolution_backward_of_part(*given)
    dout_proj_weight, dout_proj_bias = of_out_proj
    return Gradients(
        dxz=from_columns(dxz, batch, seqlen),
        dconv1d_weight=dconv1d_weight,
        dconv1d_bias=dconv1d_bias,
        dx_proj_weight=dx_proj_weight,
        ddelta_proj_weight=ddelta_proj_weight,
        dout_proj_weight=dout_proj_weight,
        dout_proj_bias=dout_proj_bias,
        dA=grads.dA,
        dB=rows_of_B.matrix,
        dC=rows_of_C.matrix,
        dD=grads.dD,
        ddelta_bias=grads.ddelta_bias,
        dB_proj_bias=rows_of_B.proj_bias,
        dC_proj_bias=rows_of_C.proj_bias,
        db_rms_weight=rows_of_B.rms_weight,
        dc_rms_weight=rows_of_C.rms_weight,
        ddt_rms_weight=ddt_rms_weight,
    )


def _convolution_backward_of_part(du, conv, options, sizes, dxz, neighbours, inputs_before):
    """As convolve: with no gradient from the first steps, and then of these alone."""
    of_first, batch, seqlen = first_steps(sizes), sizes.batch, sizes.seqlen
    first = from_columns(du, batch, seqlen)[..., : of_first.seqlen]
    dout = first.clone(memory_format=torch.contiguous_format)
    first.zero_()
    given = channels(du, sizes), None, conv, options, channels(dxz, sizes), None
    dweight, dbias = launch_convolution_backward(sizes.conv1d, *given)
    dx_first, dbefore = torch.empty_like(dout), torch.empty_like(inputs_before)
    given = dout, None, conv._replace(initial_states=inputs_before), options, dx_first, dbefore
    dweight_first, dbias_first = launch_convolution_backward(of_first, *given)
    dx = from_columns(dxz[: sizes.dim], batch, seqlen)
    dx[..., : of_first.seqlen] += dx_first
    neighbours.add_input_gradients(dbefore, dx)
    return dweight + dweight_first, None if dbias is None else dbias + dbias_first


def _finish_rows(source, dx_dbl, sizes, grad, biased, eps):
    """Makes rows of dx_dbl the gradient of B or C, if it comes from there; grad: (B, N, L), None if it is there.

    biased: (B, N, L), what the norm took.
    """
    if source.given is not None:
        return _Rows(grad, None, None)
    if grad is None and source.plain:
        return _Rows(None, None, None)
    rows, batch, seqlen = dx_dbl[source.first : source.first + sizes.dstate], sizes.batch, sizes.seqlen
    drms_weight = None
    if source.rms_weight is not None:
        grad = from_columns(rows, batch, seqlen) if grad is None else grad
        grad, drms_weight = rms_norm_channels_grad(grad, biased, source.rms_weight, eps)
    if grad is not None:
        from_columns(rows, batch, seqlen).copy_(grad)
    dproj_bias = None if source.proj_bias is None else rows.sum(1).to(source.proj_bias.dtype)
    return _Rows(None, dproj_bias, drms_weight)


def _backward_fake(dout, *arguments):
    inputs, kept, _ = unpack(arguments, Inputs, Kept, Options)
    sizes = _check(dout, inputs, kept)
    check_fake(_NAME, inputs, kept)
    dxz = inputs.xz.new_empty((2 * sizes.dim, sizes.batch, sizes.seqlen)).transpose(0, 1)
    # B and C that come from x_proj are None here, and so are their gradients
    return Gradients(dxz, *(None if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs[1:]))


mamba_inner_backward_op = define(
    f"mamba_inner_backward(Tensor dout, {signature(Inputs, Kept, Options)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(autocast_state, use_deterministic_mode),
)
