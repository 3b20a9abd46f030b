"""Upstream's import path for the selective scan and the fused Mamba block."""

from mamba_ssm.ops.mamba_block.forward import mamba_inner_fn
from mamba_ssm.ops.mamba_block.reference import mamba_inner_ref, rms_norm_ref
from mamba_ssm.ops.selective_scan import selective_scan_fn
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref

__all__ = ["mamba_inner_fn", "mamba_inner_ref", "rms_norm_ref", "selective_scan_fn", "selective_scan_ref"]
