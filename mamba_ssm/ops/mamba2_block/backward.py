"""The backward operator of a Mamba-2 block's inside: gradients of all its inputs.

The gradient of zxbcdt is one tensor that each kernel writes its part of. The convolution is computed again, and without
a norm also the scan, for its output before the gate.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import View
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.causal_conv1d.backward import launch_backward as launch_convolution_backward
from mamba_ssm.ops.mamba2_block.arguments import (
    Inputs,
    Kept,
    Options,
    channels_first,
    check,
    conv_inputs,
    convolve,
    cut,
    cut_xBC,
    heads,
    kernel_layout,
    mlp,
    norm_options,
    scan_inputs,
)
from mamba_ssm.ops.norm.arguments import in_rows
from mamba_ssm.ops.norm.gated import launch_forward as launch_norm
from mamba_ssm.ops.norm.gated_arguments import Gradients as NormGradients
from mamba_ssm.ops.norm.gated_arguments import Inputs as NormInputs
from mamba_ssm.ops.norm.gated_arguments import Kept as NormKept
from mamba_ssm.ops.norm.gated_backward import launch_backward as launch_norm_backward
from mamba_ssm.ops.norm.swiglu import launch_backward as launch_swiglu_backward
from mamba_ssm.ops.ssd.backward import Gradients as ScanGradients
from mamba_ssm.ops.ssd.backward import launch_backward as launch_scan_backward
from mamba_ssm.ops.ssd.forward import launch_forward as launch_scan

_NAME = "split_conv1d_scan_backward"


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    need_dinitial_states: bool
    recompute_out: bool


class Gradients(typing.NamedTuple):
    """The operator's results, None for those of absent inputs; with recompute_out also forward's out."""

    dzxbcdt: torch.Tensor
    dconv1d_weight: torch.Tensor
    dconv1d_bias: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dA: torch.Tensor
    dD: torch.Tensor | None
    dinitial_states: torch.Tensor | None
    drmsnorm_weight: torch.Tensor | None
    out: torch.Tensor | None


def of_inputs(results):
    """The operator's results: the gradients under the names of their inputs, and out."""
    *others, drmsnorm_weight, out = results
    return Inputs(*others, None, drmsnorm_weight), out  # None: of seq_idx


def _check(dout, dfinal_states, kept, inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    sizes, zxbcdt = check(inputs, options), inputs.zxbcdt
    batch, seqlen, dim = sizes.batch, sizes.seqlen, sizes.dim
    shape = (batch, seqlen, sizes.d_mlp + dim)
    checks.check_same(_NAME, "dout", dout, shape, zxbcdt, "zxbcdt", "(B, L, d_mlp + H P)")
    if dfinal_states is not None:
        letters = "(B, H, P, N)"
        checks.check_float32(_NAME, "dfinal_states", dfinal_states, sizes.states, zxbcdt, "zxbcdt", letters)
    if kept.y is not None:
        checks.check_same(_NAME, "y", kept.y, (batch, seqlen, dim), zxbcdt, "zxbcdt", "(B, L, H P)")
        checks.check_float32(_NAME, "rstd", kept.rstd, (batch, seqlen, sizes.ngroups), zxbcdt, "zxbcdt", "(B, L, G)")
    return sizes


def allocate(dout, inputs, sizes, wanted):
    """Results without values, but for those of the convolution's parameters, which its launcher makes."""
    A, D, dt_bias, rmsnorm_weight = inputs.A, inputs.D, inputs.dt_bias, inputs.rmsnorm_weight
    float32 = torch.float32
    return Gradients(
        empty_like(inputs.zxbcdt),
        None,
        None,
        None if dt_bias is None else empty_like(dt_bias, float32),
        empty_like(A, float32),
        None if D is None else empty_like(D),
        A.new_empty(sizes.states, dtype=float32) if wanted.need_dinitial_states else None,
        None if rmsnorm_weight is None else empty_like(rmsnorm_weight),
        empty_like(dout) if wanted.recompute_out else None,
    )


def with_convolution(grads, dweight, dbias):
    """The operator's results from those of allocate and the gradients of the convolution's parameters."""
    dzxbcdt, _, _, *others = grads
    return dzxbcdt, dweight, dbias, *others


def _backward(dout, dfinal_states, *arguments):
    kept, inputs, options, wanted = unpack(arguments, Kept, Inputs, Options, Wanted)
    sizes = _check(dout, dfinal_states, kept, inputs, options)
    grads = allocate(dout, inputs, sizes, wanted)
    inputs, row_stride = kernel_layout(inputs, options.reverse)
    if sizes.d_mlp:
        out, dmlp = (None if tensor is None else tensor.narrow(2, 0, sizes.d_mlp) for tensor in (grads.out, dout))
        launch_swiglu_backward(dmlp, mlp(inputs.zxbcdt, sizes), mlp(grads.dzxbcdt, sizes), out)
    if sizes.empty:
        return of_nothing(inputs, sizes, dfinal_states, grads)

    z, xBC, dt = cut(inputs.zxbcdt, row_stride, sizes)
    dz, dxBC, ddt = cut(grads.dzxbcdt, grads.dzxbcdt.shape[2], sizes)
    conv_out = convolve(xBC, inputs, sizes, options)
    scan = scan_inputs(conv_out, dt, None, inputs, sizes)
    if inputs.rmsnorm_weight is None:
        y = inputs.zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
        launch_scan(sizes, scan, options, heads(y, sizes), None)
        dy = gate_backward(dout, y, inputs, sizes, grads)
        del y
    else:
        dy = norm_backward(dout, kept, z, dz, inputs, options, sizes, grads)
    dconv_out = empty_like(conv_out)
    dx, dB, dC = cut_xBC(dconv_out, sizes)
    scan_grads = dx, ddt, grads.dA, dB, dC, grads.dD, grads.ddt_bias, grads.dinitial_states
    scan_grads = make(ScanGradients, scan_grads)
    dy_heads, dfinal_states = heads(dy, sizes), checks.contiguous(dfinal_states)
    launch_scan_backward(sizes, dy_heads, dfinal_states, scan, options, scan_grads)
    del dy, conv_out  # held until here: the kernels have them now
    dconv_out_first, conv = channels_first(dconv_out, sizes), conv_inputs(xBC, inputs)
    dconv1d = launch_convolution_backward(sizes.conv1d, dconv_out_first, None, conv, options.conv1d, dxBC, None)
    del dconv_out  # as above
    return with_convolution(grads, *dconv1d)


def norm_backward(dout, kept, z, dz, inputs, options, sizes, grads):
    """The gradient of the scan's output; writes dz, drmsnorm_weight and, if it is wanted, out."""
    y, rstd = kept.y.contiguous(), kept.rstd.contiguous()
    dout, dout_stride = in_rows(dout)
    row, start = sizes.dim, sizes.d_mlp
    z_row, dz_row = z.stride()[1], dz.stride()[1]
    norm, of_norm = NormInputs((y, row), inputs.rmsnorm_weight, None, (z, z_row)), norm_options(options, sizes)
    if grads.out is not None:
        out = heads(grads.out, sizes, start), grads.out.shape[2]
        launch_norm(sizes.rows, norm, options.rmsnorm_eps, of_norm, out, (None, None))
    dy = empty_like(y)
    norm_grads = NormGradients((dy, row), grads.drmsnorm_weight, None, (dz, dz_row))
    dgated = View(dout, start), dout_stride  # beside dout, which it does not keep alive
    launch_norm_backward(sizes.rows, dgated, norm, NormKept(None, rstd), of_norm, norm_grads)
    return dy


def gate_backward(dout, y, inputs, sizes, grads):
    """The gradient of y in out = y silu(z); writes that of z and, if it is wanted, out."""
    z, dz = (tensor.narrow(2, 2 * sizes.d_mlp, sizes.dim) for tensor in (inputs.zxbcdt, grads.dzxbcdt))
    dtype, dout, y, z = y.dtype, dout.narrow(2, sizes.d_mlp, sizes.dim).float(), y.float(), z.float()
    sigmoid = torch.sigmoid(z)
    silu = z * sigmoid
    dz.copy_(dout * y * (sigmoid + silu * (1 - sigmoid)))
    if grads.out is not None:
        grads.out.narrow(2, sizes.d_mlp, sizes.dim).copy_(y * silu)
    return (dout * silu).to(dtype).contiguous()


def of_nothing(inputs, sizes, dfinal_states, grads):
    """What backward returns where there is no step, or no head beside the gated MLP."""
    for grad in (grads.ddt_bias, grads.dA, grads.dD, grads.dinitial_states, grads.drmsnorm_weight):
        if grad is not None:
            grad.zero_()
    if grads.dinitial_states is not None and dfinal_states is not None:
        grads.dinitial_states.copy_(dfinal_states)
    columns = grads.dzxbcdt.shape[2]
    grads.dzxbcdt.narrow(2, 2 * sizes.d_mlp, columns - 2 * sizes.d_mlp).zero_()
    bias = inputs.conv1d_bias
    dbias = None if bias is None else torch.zeros_like(bias)
    return with_convolution(grads, torch.zeros_like(inputs.conv1d_weight), dbias)


def _backward_fake(dout, dfinal_states, *arguments):
    kept, inputs, options, wanted = unpack(arguments, Kept, Inputs, Options, Wanted)
    grads = allocate(dout, inputs, _check(dout, dfinal_states, kept, inputs, options), wanted)
    bias = inputs.conv1d_bias
    return with_convolution(grads, empty_like(inputs.conv1d_weight), None if bias is None else empty_like(bias))


split_conv1d_scan_backward_op = define(
    f"split_conv1d_scan_backward(Tensor dout, Tensor? dfinal_states, {signature(Kept, Inputs, Options, Wanted)}) "
    f"-> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
