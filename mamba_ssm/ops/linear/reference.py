"""A linear layer in plain torch, with weights of int8 too."""

import torch


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight (out, in) int8, scales (out, ceil(in / 32)) float16 -> weight[o, i] * scales[o, i // 32], float32."""
    return weight.float() * scales.float().repeat_interleave(32, dim=1)[:, : weight.shape[1]]


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear() in plain torch, of any float dtype of x, to which an int8 weight is rounded once dequantised."""
    if scales is not None:
        weight = dequantize(weight, scales).to(x.dtype)
    out = x @ weight.T
    return out if bias is None else (out + bias.to(torch.promote_types(x.dtype, bias.dtype))).to(x.dtype)
