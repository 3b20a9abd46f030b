"""LayerNorm and RMSNorm, with the residual's addition (forward, backward) or a gate (gated*); SwiGLU and softplus."""

from mamba_ssm.ops.norm import formula as _formula  # noqa: F401  (further derivatives)
from mamba_ssm.ops.norm.forward import RMSNorm, layer_norm_fn, layer_norm_linear_fn, rms_norm_fn
from mamba_ssm.ops.norm.gated import LayerNorm as GatedLayerNorm
from mamba_ssm.ops.norm.gated import RMSNorm as GatedRMSNorm
from mamba_ssm.ops.norm.gated import layernorm_fn, rmsnorm_fn
from mamba_ssm.ops.norm.reference import gated_norm_ref, gated_rms_norm_ref, layer_norm_ref, rms_norm_ref, swiglu_ref
from mamba_ssm.ops.norm.swiglu import softplus, swiglu, swiglu_backward, swiglu_forward

__all__ = [
    "GatedLayerNorm",
    "GatedRMSNorm",
    "RMSNorm",
    "gated_norm_ref",
    "gated_rms_norm_ref",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "layernorm_fn",
    "rms_norm_fn",
    "rms_norm_ref",
    "rmsnorm_fn",
    "softplus",
    "swiglu",
    "swiglu_backward",
    "swiglu_forward",
    "swiglu_ref",
]
