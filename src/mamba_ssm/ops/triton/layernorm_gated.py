"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.norm.gated import LayerNorm, RMSNorm, layernorm_fn, rmsnorm_fn
from mamba_ssm.ops.norm.reference import gated_rms_norm_ref as rms_norm_ref

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rms_norm_ref", "rmsnorm_fn"]
