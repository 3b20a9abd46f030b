"""Plain torch references of the norms and of SwiGLU: readable, differentiable any number of times.

They compute in float32, or in float64 where x is float64.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import convert, working_dtype


def normalize(x, weight, bias, eps, is_rms_norm):
    """Over the last dimension, in x's dtype."""
    if not is_rms_norm:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


def _dropped(x, dropout_p, mask):
    if mask is not None:
        return x.masked_fill(~mask, 0.0) / (1.0 - dropout_p)
    return F.dropout(x, p=dropout_p) if dropout_p > 0.0 else x


def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: torch.Tensor | None = None,
    dropout_mask1: torch.Tensor | None = None,
    upcast: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """LayerNorm of dropout(x * rowscale) + dropout(x1) + residual; arguments as layer_norm_fn.

    dropout_mask, dropout_mask1: like x; False drops an element of x, of x1. upcast: return the sum in float32; else it
    is rounded to residual's dtype (without a residual x's) before it is normalised.
    Returns y of x's dtype, or a tuple: y, with weight1 a second norm of the same sum, with prenorm the sum.
    """
    dtype = working_dtype(x)
    sum_dtype = dtype if upcast else (x if residual is None else residual).dtype
    total = x.to(dtype) if rowscale is None else x.to(dtype) * rowscale.to(dtype)[..., None]
    total = _dropped(total, dropout_p, dropout_mask)
    if x1 is not None:
        total = total + _dropped(x1.to(dtype), dropout_p, dropout_mask1)
    if residual is not None:
        total = total + residual.to(dtype)
    total = total.to(sum_dtype)
    outputs = [normalize(total.to(dtype), weight, bias, eps, is_rms_norm).to(x.dtype)]
    if weight1 is not None:
        outputs.append(normalize(total.to(dtype), weight1, bias1, eps, is_rms_norm).to(x.dtype))
    if prenorm:
        outputs.append(total)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *arguments: typing.Any, **options: typing.Any
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """layer_norm_ref without the mean: sum / rms(sum) * weight + bias."""
    return layer_norm_ref(  # type: ignore[misc]  # arguments could be all of them, for all that mypy knows
        x, weight, bias, *arguments, **options, is_rms_norm=True
    )


def gated_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
    is_rms_norm: bool = False,
) -> torch.Tensor:
    """norm(x) * silu(z), or norm(x * silu(z)), over groups of group_size neighbours; arguments as layernorm_fn.

    upcast: compute in float32, else in x's dtype.
    """
    dtype = working_dtype(x) if upcast else x.dtype
    wide, z = x.to(dtype), convert(z, dtype)
    if z is not None and not norm_before_gate:
        wide = wide * F.silu(z)
    width = wide.shape[-1]
    groups = (1, width) if group_size is None or width == 0 else (width // group_size, group_size)
    weight, bias = weight.unflatten(0, groups), None if bias is None else bias.unflatten(0, groups)
    wide = normalize(wide.unflatten(-1, groups), weight, bias, eps, is_rms_norm).flatten(-2)
    if z is not None and norm_before_gate:
        wide = wide * F.silu(z)
    return wide.to(x.dtype)


def gated_rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> torch.Tensor:
    """gated_norm_ref without the mean."""
    return gated_norm_ref(x, weight, bias, z, eps, group_size, norm_before_gate, upcast, is_rms_norm=True)


def swiglu_ref(xy: torch.Tensor, gate_last: bool = False) -> torch.Tensor:
    """silu(x) * y of the two halves of xy's last dimension, x the first unless gate_last."""
    x, y = xy.to(working_dtype(xy)).chunk(2, dim=-1)
    if gate_last:
        x, y = y, x
    return (F.silu(x) * y).to(xy.dtype)
