"""Upstream's import path for the selective scan and the fused Mamba block."""

from mamba_ssm.ops.mamba_inner import mamba_inner_fn
from mamba_ssm.ops.reference import mamba_inner_ref, rms_norm_ref, selective_scan_ref
from mamba_ssm.ops.selective_scan import selective_scan_fn

__all__ = ["mamba_inner_fn", "mamba_inner_ref", "rms_norm_ref", "selective_scan_fn", "selective_scan_ref"]
