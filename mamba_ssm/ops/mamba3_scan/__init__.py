"""Mamba-3's scan, a decoding step of it, and its reference in plain torch."""

from mamba_ssm.ops.mamba3_scan.arguments import States
from mamba_ssm.ops.mamba3_scan.backward import MOST_CUDA_RANK
from mamba_ssm.ops.mamba3_scan.forward import mamba3_scan
from mamba_ssm.ops.mamba3_scan.reference import mamba3_scan_ref
from mamba_ssm.ops.mamba3_scan.step import mamba3_step

__all__ = ["MOST_CUDA_RANK", "States", "mamba3_scan", "mamba3_scan_ref", "mamba3_step"]
