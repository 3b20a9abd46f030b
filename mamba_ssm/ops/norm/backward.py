"""The backward operator of LayerNorm and RMSNorm with the residual's addition."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.norm import arguments as common

_NAME = "layer_norm_backward"


class Kept(typing.NamedTuple):
    """What forward has kept: the sum that was normalised (without a residual x), parameters, statistics of each row."""

    sum: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


class Options(typing.NamedTuple):
    """What else the operator takes."""

    is_rms_norm: bool


class Gradients(typing.NamedTuple):
    """The operator's results; dresidual where the sum has another dtype than x, else it is dx."""

    dx: torch.Tensor
    dresidual: torch.Tensor | None
    dweight: torch.Tensor
    dbias: torch.Tensor | None


def _check(dout, dsum, kept, options):
    total = kept.sum
    common.check_rows(_NAME, "dout", dout)
    common.check_parameters(_NAME, dout, kept.weight, kept.bias)
    common.check_beside(_NAME, "sum", total, dout)
    if dsum is not None:
        if total.dtype == dout.dtype:
            common.check_beside(_NAME, "dsum", dsum, dout)
        else:
            checks.check_same(_NAME, "dsum", dsum, total.shape, total, "sum", "(..., N)")
    common.check_statistics(_NAME, dout, 1, kept.mean, kept.rstd, options.is_rms_norm)


def _allocate(dout, kept):
    """The operator's outputs, without values."""
    dresidual = None if kept.sum.dtype == dout.dtype else empty_like(kept.sum)
    dbias = None if kept.bias is None else empty_like(kept.bias)
    return make(Gradients, (empty_like(dout), dresidual, empty_like(kept.weight), dbias))


def _backward(dout, dsum, *arguments):
    kept, options = unpack(arguments, Kept, Options)
    _check(dout, dsum, kept, options)
    grads = _allocate(dout, kept)
    if dout.numel() == 0:
        for grad in (grads.dweight, grads.dbias):
            if grad is not None:
                grad.zero_()
        return grads
    total, width = kept.sum, dout.shape[-1]
    weight, bias = kept.weight.contiguous(), checks.contiguous(kept.bias)
    rstd, mean = kept.rstd.contiguous(), checks.contiguous(kept.mean)
    params = abi.MambaNormBackward()
    functions = place(params, dout)
    other_dtype = total.dtype if dsum is None else dsum.dtype
    common.fill(params, dout.numel() // width, dout.dtype, weight, bias, width, options.is_rms_norm, other_dtype)
    dout, params.dout_row_stride = common.in_rows(dout)
    params.dout = dout.data_ptr()
    if dsum is not None:
        dsum, params.dresidual_out_row_stride = common.in_rows(dsum)
        params.dresidual_out = dsum.data_ptr()
    total, row_stride = common.in_rows(total)
    if total.dtype == dout.dtype:
        params.x, params.x_row_stride = total.data_ptr(), row_stride
    else:
        params.residual_out, params.residual_out_row_stride = total.data_ptr(), row_stride
        params.dresidual, params.dresidual_row_stride = grads.dresidual.data_ptr(), width
    params.dx, params.dx_row_stride = grads.dx.data_ptr(), width
    workspace = common.fill_gradients(params, functions, mean, rstd, grads.dweight, grads.dbias)
    run(functions, "norm_backward", params)
    del workspace  # until here
    return grads


def _backward_fake(dout, dsum, *arguments):
    kept, options = unpack(arguments, Kept, Options)
    _check(dout, dsum, kept, options)
    return _allocate(dout, kept)


add_norm_backward_op = define(
    f"add_norm_backward(Tensor dout, Tensor? dsum, {signature(Kept, Options)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
