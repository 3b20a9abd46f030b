"""Upstream's import path; the code is plain torch, triton is never imported."""

from mamba_ssm.ops.mamba3_scan.step_parts import apply_rotary_qk_inference_fwd

__all__ = ["apply_rotary_qk_inference_fwd"]
