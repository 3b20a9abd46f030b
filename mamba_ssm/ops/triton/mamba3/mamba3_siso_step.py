"""Upstream's import path; the code is this package's own scan, triton is never imported."""

from mamba_ssm.ops.mamba3_scan.combined import mamba3_siso_step

__all__ = ["mamba3_siso_step"]
