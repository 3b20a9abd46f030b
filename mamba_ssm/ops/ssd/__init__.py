"""Mamba-2's scan (structured state space duality), and its pieces in plain torch."""

from mamba_ssm.ops.ssd import formula as _formula  # noqa: F401  (further derivatives)
from mamba_ssm.ops.ssd.chunks import mamba_chunk_scan
from mamba_ssm.ops.ssd.forward import mamba_chunk_scan_combined
from mamba_ssm.ops.ssd.reference import ssd_chunk_scan_combined_ref, ssd_selective_scan

__all__ = [
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "ssd_chunk_scan_combined_ref",
    "ssd_selective_scan",
]
