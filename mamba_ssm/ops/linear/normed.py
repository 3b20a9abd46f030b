"""RMSNorm and an int8 linear layer of one row as one kernel: at batch 1 a decoding step waits for launches most."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, pointer, run
from mamba_ssm._torch import autocast_dtype, call, define, derivatives, is_compiling, reference, signature, unpack

NAME = "normed_linear"
_VECTOR = 16  # features that the kernel reads at once, and the alignment in bytes
_DENSE = torch.Tensor, torch.nn.Parameter  # a subclass, such as a fake tensor, may have no address


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order."""

    x: torch.Tensor
    residual: torch.Tensor | None
    norm_weight: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operator takes."""

    eps: float
    sum_in_fp32: bool


def normed_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    sum_in_fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear(rms_norm(x + residual), weight, bias, scales), (1, out), and the sum, (1, in) of residual's dtype.

    Without a residual the sum is x, in float32 with sum_in_fp32.

    x (1, in), residual like x or float32, norm_weight (in) of any float dtype, weight (out, in) int8 and its scales as
    linear() takes them. Roundings are those of the two operators. On CUDA devices alone, and there is no gradient: see
    takes_norm for what else it asks.
    """
    out, total = call(normed_linear_op, x, residual, norm_weight, weight, scales, bias, eps, sum_in_fp32)
    return out, total


def takes_norm(x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether normed_linear takes these and computes what two operators would: one row on a GPU, without gradients."""
    width = weight.shape[1]
    if not x.is_cuda or is_compiling() or x.numel() != width or width % _VECTOR or width > abi.MAX_LINEAR_NORM:
        return False
    if torch.is_grad_enabled() or reference.on or x.dtype not in checks.FLOAT_DTYPES or autocast_dtype(x) is not None:
        return False
    if residual is not None and residual.dtype not in (x.dtype, torch.float32):
        return False
    if norm_weight.dtype not in checks.FLOAT_DTYPES or derivatives.wanted((x, residual)):
        return False
    tensors = x, x if residual is None else residual, norm_weight, weight
    return all(type(t) in _DENSE and t.is_contiguous() and t.data_ptr() % _VECTOR == 0 for t in tensors)


def _check(inputs):
    x, residual, norm_weight, weight, scales, bias = inputs
    checks.check_dims(NAME, "x", x, 2, "(1, in)")
    checks.check_activation_dtype(NAME, "x", x)
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if residual is None:
        pass
    elif residual.dtype == torch.float32:
        checks.check_float32(NAME, "residual", residual, x.shape, x, "x", "(1, in)")
    else:
        checks.check_same(NAME, "residual", residual, x.shape, x, "x", "(1, in)")
    checks.check_float(NAME, "norm_weight", norm_weight, (in_features,), x, "x", "(in,)")
    checks.check_is(NAME, "weight", weight, torch.int8, (out_features, in_features), x, "x", "(out, in)")
    blocks = -(-in_features // abi.INT8_BLOCK)
    checks.check_is(NAME, "scales", scales, torch.float16, (out_features, blocks), x, "x", "(out, ceil(in / 32))")
    if bias is not None:
        checks.check_float(NAME, "bias", bias, (out_features,), x, "x", "(out,)")
    return rows, in_features, out_features


def _allocate(inputs, options, rows, out_features):
    x, residual = inputs.x, inputs.residual
    dtype = residual.dtype if residual is not None else torch.float32 if options.sum_in_fp32 else x.dtype
    return x.new_empty(rows, out_features), x.new_empty(x.shape, dtype=dtype)


def _normed_linear(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    rows, in_features, out_features = _check(inputs)
    x, residual, norm_weight, weight, scales, bias = (checks.contiguous(tensor) for tensor in inputs)
    out, total = _allocate(inputs, options, rows, out_features)
    params = abi.MambaLinear()
    functions = place(params, out)
    params.rows, params.in_features, params.out_features = rows, in_features, out_features
    params.dtype, params.weight_dtype = DTYPE_CODES[x.dtype], abi.INT8
    params.norm_weight_dtype, params.residual_dtype = DTYPE_CODES[norm_weight.dtype], DTYPE_CODES[total.dtype]
    params.norm_eps = options.eps
    params.x, params.weight, params.scales = x.data_ptr(), weight.data_ptr(), scales.data_ptr()
    params.norm_weight, params.residual = norm_weight.data_ptr(), pointer(residual)
    params.bias = pointer(bias)
    if bias is not None:
        params.bias_dtype = DTYPE_CODES[bias.dtype]
    params.residual_out, params.out = total.data_ptr(), out.data_ptr()
    params.x_row_stride, params.out_row_stride = in_features, out_features
    run(functions, "linear", params)
    return out, total


def _normed_linear_fake(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    rows, _, out_features = _check(inputs)
    return _allocate(inputs, options, rows, out_features)


normed_linear_op = define(
    f"{NAME}({signature(Inputs, Options)}) -> (Tensor, Tensor)", _normed_linear, _normed_linear_fake, planned=()
)
