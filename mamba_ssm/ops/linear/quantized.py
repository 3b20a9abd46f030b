"""Weights of 8 bits: 32 neighbours of a row share a scale. The numbers are those of llama.cpp's Q8_0."""

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import autocast_dtype, derivatives, reference, watched
from mamba_ssm.ops.linear.dequantize import dequantize
from mamba_ssm.ops.linear.linear import is_few_rows, linear
from mamba_ssm.ops.linear.reference import BLOCK

_LARGEST = 127
# Numbers of a weight that are dequantised at a time on the CPU. A whole head's copy would be new memory in each call,
# whose pages the system clears one by one.
_PIECE = 1 << 21
_NAME = "quantized_linear"


def scales_shape(weight_shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """(out, ceil(in / 32)) of a weight (out, in)."""
    return *weight_shape[:-1], -(-weight_shape[-1] // BLOCK)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (out, in), floating -> int8 (out, in) and float16 scales (out, ceil(in / 32)).

    A block's scale is its largest magnitude / 127. Weights are divided by it before it is rounded to float16, and then
    rounded to the nearest integer, halves away from zero: what llama.cpp's quantize_row_q8_0_ref does.

    Raises:
        ValueError: a weight is not finite, or beyond 127 times float16's largest number.
    """
    checks.check_dims("quantize", "a weight", weight, 2, "(out, in)")
    with torch.no_grad():
        blocks = F.pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(dim=2) / _LARGEST if blocks.numel() else blocks.new_empty(blocks.shape[:2])
        stored = scales.half()
        if not weight.is_meta and not stored.isfinite().all():
            raise ValueError(
                f"quantize: weights must be finite and below {_LARGEST * torch.finfo(torch.float16).max:.3g}, "
                f"got {weight.abs().max().item():g}"
            )
        inverse = 1 / scales
        scaled = blocks * torch.where(inverse.isfinite(), inverse, 0)[..., None]
        whole = scaled.trunc()
        whole += (2 * (scaled - whole)).trunc()
        values = whole.flatten(1)[:, : weight.shape[1]].to(torch.int8)
    return values.contiguous(), stored


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., in), floating, and a weight as quantize_weight gives it -> x weight^T + bias, (..., out), of x's dtype.

    A few rows of x are multiplied by the 8-bit weight, more by a copy of it in x's dtype, which lasts as long as the
    call, on the CPU piece by piece. Gradients are those of x and bias; backward makes the copy anew.
    Forward mode and torch.func take the copy too.
    """
    checks.check_tensor(_NAME, "x", x)
    if not x.is_floating_point():
        raise TypeError(f"{_NAME}: x must be floating-point, got {checks.short(x.dtype)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{_NAME}: x must be (..., in) with weight's in = {weight.shape[1]}, got {tuple(x.shape)}")
    if x.device != weight.device:
        cure = checks.cure_of_devices(weight.is_meta, x.is_meta)
        raise ValueError(f"{_NAME}: x must be on {weight.device} like weight, got {x.device}: {cure}")
    cast = autocast_dtype(x)
    if cast is not None and x.dtype in checks.FLOAT_DTYPES:
        x = x.to(cast)
    if derivatives.wanted((x, bias)):  # which torch's own product has
        return _product(x, weight, scales, bias)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(x, weight, scales, bias)
    if reference.on or not is_few_rows(x, quantized=True):
        return _product(x, weight, scales, bias)
    if x.dim() == 2:  # as a step's
        return linear(x, weight, bias, scales)
    return linear(x.reshape(-1, x.shape[-1]), weight, bias, scales).view(*x.shape[:-1], -1)


def _product(x, weight, scales, bias):
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    if x.is_cpu and weight.shape[0] > rows and not (reference.on or watched()):
        return _product_by_pieces(x, weight, scales, bias, rows)
    return F.linear(x, dequantize(weight, scales, x.dtype), None if bias is None else bias.to(x.dtype))


def _product_by_pieces(x, weight, scales, bias, rows):
    """The same with a copy of so many rows of the weight at a time."""
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    out = x.new_empty(flat.shape[0], out_features)
    for first in range(0, out_features, rows):
        piece = slice(first, first + rows)
        copy = dequantize(weight[piece], scales[piece], x.dtype).t()
        if bias is None:
            torch.mm(flat, copy, out=out[:, piece])
        else:
            torch.addmm(bias[piece].to(x.dtype), flat, copy, out=out[:, piece])
    return out.view(*x.shape[:-1], out_features)


class _Product(torch.autograd.Function):
    """Keeps the 8-bit weight for backward, where F.linear would keep its copy in x's dtype."""

    @staticmethod
    def forward(ctx, x, weight, scales, bias):
        ctx.save_for_backward(weight, scales)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(x, weight, scales, bias)

    @staticmethod
    def backward(ctx, gradient):
        weight, scales = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ dequantize(weight, scales, gradient.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return of_x, None, None, of_bias
