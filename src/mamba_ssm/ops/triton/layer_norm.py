"""Upstream's import path; the code is native, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

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


class LayerNormFn:
    """layer_norm_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(layer_norm_fn)


class LayerNormLinearFn:
    """layer_norm_linear_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(layer_norm_linear_fn)


if not typing.TYPE_CHECKING:
    _NAMES = ("_layer_norm_fwd", "_layer_norm_bwd", "_layer_norm_fwd_1pass_kernel", "_layer_norm_bwd_kernel")
    __getattr__ = kernels(__name__, dict.fromkeys(_NAMES, "layer_norm_fn or rms_norm_fn"))
