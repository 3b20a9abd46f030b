"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.mamba2_block import (
    mamba_conv1d_scan_ref,
    mamba_split_conv1d_scan_combined,
    mamba_split_conv1d_scan_ref,
)
from mamba_ssm.ops.ssd import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    ssd_chunk_scan_combined_ref,
    ssd_selective_scan,
)

__all__ = [
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_conv1d_scan_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
    "ssd_chunk_scan_combined_ref",
    "ssd_selective_scan",
]
