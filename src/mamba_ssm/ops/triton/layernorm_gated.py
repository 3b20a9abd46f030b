"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.norm import GatedLayerNorm as LayerNorm
from mamba_ssm.ops.norm import GatedRMSNorm as RMSNorm
from mamba_ssm.ops.norm import gated_rms_norm_ref as rms_norm_ref
from mamba_ssm.ops.norm import layernorm_fn, rmsnorm_fn

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rms_norm_ref", "rmsnorm_fn"]
