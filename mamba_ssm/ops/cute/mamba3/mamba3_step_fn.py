"""Upstream's import path; the code is plain torch, no CuTe is imported."""

from mamba_ssm.ops.mamba3_scan.step_parts import mamba3_step_fn

__all__ = ["mamba3_step_fn"]
