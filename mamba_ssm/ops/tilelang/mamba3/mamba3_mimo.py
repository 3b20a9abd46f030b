"""Upstream's import path; the code is this package's own scan, tilelang is never imported."""

from mamba_ssm.ops.mamba3_scan.combined import mamba3_mimo

__all__ = ["mamba3_mimo"]
