"""Rows of an int8 weight as numbers: an embedding's, or all of them for a product of many rows."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import call, define, reference, signature, unpack
from mamba_ssm.ops.linear.reference import dequantize_ref

_NAME = "dequantize"
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order."""

    weight: torch.Tensor
    scales: torch.Tensor
    indices: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operator takes."""

    dtype_code: int


def dequantize(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """weight (out, in) int8 and scales (out, ceil(in / 32)) float16 -> (out, in) of dtype, each number rounded once.

    indices (...), int64 or int32: these rows of it, (..., in), as an embedding has them. On the CPU an index outside
    0..out - 1 raises IndexError; on CUDA, where looking at it would be a synchronisation, its row is NaN. There is no
    gradient.
    """
    if not (reference.on or dtype not in DTYPE_CODES or weight.device.type not in ("cpu", "cuda", "meta")):
        return call(dequantize_op, weight, scales, indices, DTYPE_CODES[dtype])
    if indices is not None:
        weight, scales = (torch.nn.functional.embedding(indices, rows) for rows in (weight, scales))
    return dequantize_ref(weight, scales, dtype)


def _check(inputs):
    """Raises on any argument that the kernels do not take; returns the result's shape."""
    weight, scales, indices = inputs
    checks.check_dims(_NAME, "weight", weight, 2, "(out, in)")
    out_features, in_features = weight.shape
    checks.check_is(_NAME, "weight", weight, torch.int8, weight.shape, weight, "weight", "(out, in)")
    blocks = -(-in_features // abi.INT8_BLOCK)
    checks.check_is(
        _NAME, "scales", scales, torch.float16, (out_features, blocks), weight, "weight", "(out, ceil(in / 32))"
    )
    if indices is None:
        return out_features, in_features
    checks.check_index(_NAME, "indices", indices, indices.shape, weight, "weight", "(...)")
    return *indices.shape, in_features


def _dequantize(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    shape = _check(inputs)
    weight, scales, indices = (checks.contiguous(tensor) for tensor in inputs)
    out = weight.new_empty(shape, dtype=_DTYPES[options.dtype_code])
    params = abi.MambaDequantize()
    functions = place(params, out)
    params.weight_rows, params.features = weight.shape
    params.rows, params.dtype = params.weight_rows, options.dtype_code
    params.weight, params.scales, params.out = weight.data_ptr(), scales.data_ptr(), out.data_ptr()
    if indices is not None:
        params.rows, params.index_bytes = indices.numel(), indices.element_size()
        params.indices = indices.data_ptr()
    if out.numel() > 0:
        run(functions, _NAME, params)
    return out


def _dequantize_fake(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    return inputs.weight.new_empty(_check(inputs), dtype=_DTYPES[options.dtype_code])


dequantize_op = define(f"{_NAME}({signature(Inputs, Options)}) -> Tensor", _dequantize, _dequantize_fake)
