"""Upstream's import path; the code is plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.chunk_parts import dacs_segsum as compute_dacs_segsum_triton
from mamba_ssm.ops.mamba3_scan.chunk_parts import dacs_segsum_backward as bwd_dadt_fused_triton
from mamba_ssm.ops.mamba3_scan.chunk_parts import dacs_segsum_ref as compute_dacs_segsum_ref
from mamba_ssm.ops.mamba3_scan.chunk_parts import trap_dt_backward as bwd_dtrap_ddt_triton

bwd_dadt_fused_triton_varlen, bwd_dtrap_ddt_triton_varlen = bwd_dadt_fused_triton, bwd_dtrap_ddt_triton
compute_dacs_segsum_triton_varlen, compute_dacs_segsum_ref_varlen = compute_dacs_segsum_triton, compute_dacs_segsum_ref

__all__ = [
    "bwd_dadt_fused_triton",
    "bwd_dadt_fused_triton_varlen",
    "bwd_dtrap_ddt_triton",
    "bwd_dtrap_ddt_triton_varlen",
    "compute_dacs_segsum_ref",
    "compute_dacs_segsum_ref_varlen",
    "compute_dacs_segsum_triton",
    "compute_dacs_segsum_triton_varlen",
]

if not typing.TYPE_CHECKING:
    _INSTEAD = {
        "bwd_dadt_cumsum_fused_kernel": "bwd_dadt_fused_triton",
        "bwd_dadt_cumsum_fused_kernel_varlen": "bwd_dadt_fused_triton_varlen",
        "bwd_segsum_dadt_kernel": "bwd_dadt_fused_triton",
        "bwd_segsum_dadt_kernel_varlen": "bwd_dadt_fused_triton_varlen",
        "bwd_dtrap_ddt_kernel": "bwd_dtrap_ddt_triton",
        "bwd_dtrap_ddt_kernel_varlen": "bwd_dtrap_ddt_triton_varlen",
        "dacs_segsum_kernel": "compute_dacs_segsum_triton",
        "dacs_segsum_kernel_varlen": "compute_dacs_segsum_triton_varlen",
    }
    __getattr__ = kernels(__name__, _INSTEAD)
