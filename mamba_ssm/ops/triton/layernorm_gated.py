"""Upstream's import path; the code is native, triton is never imported."""

import typing

from mamba_ssm._upstream import AutogradFunction, kernels
from mamba_ssm.ops.norm import GatedLayerNorm as LayerNorm
from mamba_ssm.ops.norm import GatedRMSNorm as RMSNorm
from mamba_ssm.ops.norm import gated_rms_norm_ref as rms_norm_ref
from mamba_ssm.ops.norm import layernorm_fn, rmsnorm_fn
from mamba_ssm.ops.norm.gated_parts import gated_norm_backward as _layer_norm_bwd
from mamba_ssm.ops.norm.gated_parts import gated_norm_forward as _layer_norm_fwd

__all__ = [
    "LayerNorm",
    "LayerNormFn",
    "RMSNorm",
    "_layer_norm_bwd",
    "_layer_norm_fwd",
    "layernorm_fn",
    "rms_norm_ref",
    "rmsnorm_fn",
]


class LayerNormFn(AutogradFunction):
    """layernorm_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(layernorm_fn)
    gradients = 8


if not typing.TYPE_CHECKING:
    _INSTEAD = {"_layer_norm_fwd_1pass_kernel": "_layer_norm_fwd", "_layer_norm_bwd_kernel": "_layer_norm_bwd"}
    __getattr__ = kernels(__name__, _INSTEAD)
