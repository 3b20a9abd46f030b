"""Gradients: memory for them, and those of a linear layer."""

import torch

from mamba_ssm._torch import is_traced

HAS_OUT_DTYPE = "dtype_out" in torch.ops.aten.addmm.overloads()  # torch 2.8, CUDA


def empty_like(tensor, dtype=None):
    """A new contiguous tensor of the same shape: half the time of new_empty."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def silu_derivatives(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """silu(z), its first and its second derivative."""
    s = torch.sigmoid(z)
    silu, rest = z * s, 1 - s
    return silu, torch.addcmul(s, silu, rest), (z * (1 - 2 * s)).add_(2).mul_(s).mul_(rest)


def linear_gradients(dout, x, weight, need_bias, weight_dtype):
    """Gradients of x, weight and bias in F.linear(x, weight, bias), x (B, L, features). None: that of weight without x,
    that of x without weight, and that of bias unless need_bias. weight_dtype: see product.
    """
    rows = dout.reshape(-1, dout.shape[-1])
    dx = None if weight is None else torch.matmul(dout, weight)
    dweight = None if x is None else product(rows.t(), x.reshape(-1, x.shape[-1]), weight_dtype)
    return dx, dweight, rows.sum(0) if need_bias else None


def product(a, b, dtype):
    """a b, in dtype if torch can: a parameter's gradient under autocast, which would be rounded and then cast."""
    if dtype is torch.float32 and a.dtype is not dtype and HAS_OUT_DTYPE and a.is_cuda and not is_traced():
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b)
