"""Upstream's import path; the code is native, triton is never imported."""

import typing

from mamba_ssm._upstream import AutogradFunction, kernels
from mamba_ssm.ops.norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)
from mamba_ssm.ops.norm.parts import norm_backward as _layer_norm_bwd
from mamba_ssm.ops.norm.parts import norm_forward as _layer_norm_fwd

__all__ = [
    "LayerNormFn",
    "LayerNormLinearFn",
    "RMSNorm",
    "_layer_norm_bwd",
    "_layer_norm_fwd",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]


class LayerNormFn(AutogradFunction):
    """layer_norm_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(layer_norm_fn)
    gradients = 14


class LayerNormLinearFn(AutogradFunction):
    """layer_norm_linear_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(layer_norm_linear_fn)
    gradients = 10


if not typing.TYPE_CHECKING:
    _INSTEAD = {"_layer_norm_fwd_1pass_kernel": "_layer_norm_fwd", "_layer_norm_bwd_kernel": "_layer_norm_bwd"}
    __getattr__ = kernels(__name__, _INSTEAD)
