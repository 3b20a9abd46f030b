"""Upstream's import path; the pieces are plain torch, triton is never imported."""

from mamba_ssm.ops.ssd.chunks import chunk_scan

chunk_scan_ref = chunk_scan

__all__ = ["chunk_scan", "chunk_scan_ref"]
