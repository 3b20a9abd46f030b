"""Import path and order of arguments of mamba_ssm 1.x, for its forks; the code is native, triton is never imported."""

import typing

import torch

from mamba_ssm._upstream import AutogradFunction
from mamba_ssm.ops.norm import RMSNorm, layer_norm_linear_fn
from mamba_ssm.ops.norm import layer_norm_fn as _layer_norm_fn
from mamba_ssm.ops.norm import layer_norm_ref as _layer_norm_ref
from mamba_ssm.ops.triton.layer_norm import LayerNormLinearFn

__all__ = [
    "LayerNormFn",
    "LayerNormLinearFn",
    "RMSNorm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]

_Result: typing.TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]


def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> _Result:
    """layer_norm.layer_norm_fn with the arguments of mamba_ssm 1.x."""
    options: dict[str, typing.Any] = {"residual_in_fp32": residual_in_fp32, "is_rms_norm": is_rms_norm}
    return _layer_norm_fn(x, weight, bias, residual, eps=eps, prenorm=prenorm, **options)


def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> _Result:
    """layer_norm.rms_norm_fn with the arguments of mamba_ssm 1.x."""
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    upcast: bool = False,
) -> _Result:
    """layer_norm_fn in plain torch."""
    return _layer_norm_ref(x, weight, bias, residual, eps=eps, prenorm=prenorm, upcast=upcast)


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    upcast: bool = False,
) -> _Result:
    """rms_norm_fn in plain torch."""
    return _layer_norm_ref(x, weight, bias, residual, eps=eps, prenorm=prenorm, upcast=upcast, is_rms_norm=True)


class LayerNormFn(AutogradFunction):
    """layer_norm_fn by the name of its autograd.Function."""

    apply = staticmethod(layer_norm_fn)
    gradients = 8
