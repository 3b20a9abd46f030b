"""Upstream's import path; the code is native, triton is never imported."""

import typing

from mamba_ssm._upstream import AutogradFunction, kernels
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
from mamba_ssm.ops.ssd.chunk_gradients import scan_and_state_backward_dx as _chunk_scan_chunk_state_bwd_dx
from mamba_ssm.ops.ssd.combined_parts import combined_backward as _mamba_chunk_scan_combined_bwd
from mamba_ssm.ops.ssd.combined_parts import combined_forward as _mamba_chunk_scan_combined_fwd
from mamba_ssm.ops.ssd.combined_parts import selective_scan_backward as selective_scan_bwd

__all__ = [
    "MambaChunkScanCombinedFn",
    "MambaSplitConv1dScanCombinedFn",
    "_chunk_scan_chunk_state_bwd_dx",
    "_mamba_chunk_scan_combined_bwd",
    "_mamba_chunk_scan_combined_fwd",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_conv1d_scan_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
    "selective_scan_bwd",
    "ssd_chunk_scan_combined_ref",
    "ssd_selective_scan",
]


class MambaChunkScanCombinedFn(AutogradFunction):
    """mamba_chunk_scan_combined by the name of upstream's autograd.Function."""

    apply = staticmethod(mamba_chunk_scan_combined)
    gradients = 16


class MambaSplitConv1dScanCombinedFn(AutogradFunction):
    """mamba_split_conv1d_scan_combined by the name of upstream's autograd.Function."""

    apply = staticmethod(mamba_split_conv1d_scan_combined)
    gradients = 19


if not typing.TYPE_CHECKING:
    _INSTEAD = {"_chunk_scan_chunk_state_bwd_dx_kernel": "_chunk_scan_chunk_state_bwd_dx"}
    __getattr__ = kernels(__name__, _INSTEAD)
