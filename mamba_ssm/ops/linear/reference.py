"""linear() and dequantize() in plain torch."""

import torch

from mamba_ssm._native import abi

BLOCK = abi.INT8_BLOCK  # weights that share a scale


def dequantize_ref(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dequantize() in plain torch: int8 (..., in) and float16 scales (..., ceil(in / 32)) -> (..., in), rounded once.

    dtype may be any floating one.
    """
    wide = scales.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if weight.shape[-1] % BLOCK == 0:
        return (weight.unflatten(-1, (-1, BLOCK)) * wide[..., None]).to(dtype).flatten(-2)
    return (weight * wide.repeat_interleave(BLOCK, dim=-1)[..., : weight.shape[-1]]).to(dtype)


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear() in plain torch, of any float dtype of x, to which an int8 weight is rounded once dequantised."""
    if scales is not None:
        weight = dequantize_ref(weight, scales, x.dtype)
    out = x @ weight.T
    return out if bias is None else (out + bias.to(torch.promote_types(x.dtype, bias.dtype))).to(x.dtype)
