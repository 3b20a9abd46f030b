"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]
