"""A linear layer of few rows, as decoding has.

On a GPU it starts while the kernel before it ends, and lets the next one do so; on a CPU a weight of 16 or 8 bits is
widened in registers, and read once for 8 rows.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import (
    autocast_dtype,
    call,
    define,
    derivatives,
    is_plain,
    make,
    reference,
    signature,
    weight_and_bias,
)

NAME = "linear"
# Rows up to which linear() is faster than torch's product.
_FEW_ROWS_CUDA = 4
_FEW_ROWS_CUDA_INT8 = 8
_FEW_ROWS_CPU = 8


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None = None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (R, in), weight (out, in) of x's dtype, bias (out) of any -> x weight^T + bias, (R, out).

    float32, float16 or bfloat16. There is no gradient: backward raises. weight may be int8 with scales (out, ceil(in /
    32)) float16: it then stands for weight[o, i] * scales[o, i // 32] (the numbers of GGUF's Q8_0).
    """
    return call(linear_op, x, weight, bias, scales)


def project(projection: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """projection(x), x (..., in): by linear() where that is faster, which is for a decoding step's few rows.

    A projection that is more than an nn.Linear's parameters is called, and so is one that may need a gradient.
    """
    if torch.is_grad_enabled() or reference.on or not is_few_rows(x) or not is_plain(projection, torch.nn.Linear):
        return projection(x)
    weight, bias = weight_and_bias(projection)
    if x.dtype != weight.dtype or autocast_dtype(x) is not None or derivatives.wanted((x, weight, bias)):
        return projection(x)
    if x.dim() == 2:  # as a step's
        return linear(x, weight, bias)
    return linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def is_few_rows(x: torch.Tensor, quantized: bool = False) -> bool:
    """Whether linear() is faster for so many rows. A size that an export keeps open is not asked: that would fix it.

    quantized: by an int8 weight, which torch's product would have to be dequantised for.
    """
    dtype = x.dtype
    if dtype not in checks.FLOAT_DTYPES:
        return False
    if x.is_cuda:
        most = _FEW_ROWS_CUDA_INT8 if quantized else _FEW_ROWS_CUDA
    elif x.is_cpu:
        most = _FEW_ROWS_CPU
    else:
        return False
    for size in x.shape:
        if not isinstance(size, int):
            return False
    return 0 < x.numel() <= most * x.shape[-1]


def _check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    x, weight, bias, scales = inputs
    if x.dim() != 2 or weight.dim() != 2:
        checks.check_dims(NAME, "x", x, 2, "(R, in)")
        checks.check_dims(NAME, "weight", weight, 2, "(out, in)")
    checks.check_activation_dtype(NAME, "x", x)
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if scales is None:
        if weight.dtype == torch.int8:
            raise TypeError(f"{NAME}: an int8 weight needs scales, float16 of shape (out, ceil(in / 32)), got None")
        checks.check_same(NAME, "weight", weight, (out_features, in_features), x, "x", "(out, in)")
    else:
        checks.check_is(NAME, "weight", weight, torch.int8, (out_features, in_features), x, "x", "(out, in)")
        blocks = -(-in_features // abi.INT8_BLOCK)
        checks.check_is(NAME, "scales", scales, torch.float16, (out_features, blocks), x, "x", "(out, ceil(in / 32))")
    if bias is not None:
        checks.check_float(NAME, "bias", bias, (out_features,), x, "x", "(out,)")
    return rows, in_features, out_features


def _linear(*arguments):
    inputs = make(Inputs, arguments)
    rows, in_features, out_features = _check(inputs)
    x, weight, bias, scales = inputs
    out = x.new_empty(rows, out_features)
    if out.numel() == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    weight, bias, scales = weight.contiguous(), checks.contiguous(bias), checks.contiguous(scales)
    params = abi.MambaLinear()
    functions = place(params, out)
    params.rows, params.in_features, params.out_features = rows, in_features, out_features
    params.dtype = params.weight_dtype = DTYPE_CODES[x.dtype]
    params.x = x.data_ptr()
    params.x_row_stride = x.stride(0)
    params.weight = weight.data_ptr()
    if scales is not None:
        params.weight_dtype = abi.INT8
        params.scales = scales.data_ptr()
    if bias is not None:
        params.bias = bias.data_ptr()
        params.bias_dtype = DTYPE_CODES[bias.dtype]
    params.out = out.data_ptr()
    params.out_row_stride = out_features
    run(functions, NAME, params)
    return out


def _linear_fake(*arguments):
    inputs = Inputs(*arguments)
    rows, _, out_features = _check(inputs)
    return inputs.x.new_empty(rows, out_features)


linear_op = define(f"{NAME}({signature(Inputs)}) -> Tensor", _linear, _linear_fake, planned=())
