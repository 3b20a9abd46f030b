"""Upstream's import path; the code is plain torch, triton is never imported."""

from mamba_ssm.ops.mamba3_scan.step_parts import angle_dt_fwd

__all__ = ["angle_dt_fwd"]
