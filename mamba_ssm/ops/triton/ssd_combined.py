"""Upstream's import path; the code is native, triton is never imported."""

import typing

import torch

from mamba_ssm._upstream import AutogradFunction, init_to_zero, kernels
from mamba_ssm.ops.mamba2_block import (
    mamba_conv1d_scan_ref,
    mamba_split_conv1d_scan_combined,
    mamba_split_conv1d_scan_ref,
)
from mamba_ssm.ops.norm import rmsnorm_fn
from mamba_ssm.ops.norm import swiglu_backward as _swiglu_bwd
from mamba_ssm.ops.norm import swiglu_forward as _swiglu_fwd
from mamba_ssm.ops.norm.gated_parts import gated_norm_backward as _layer_norm_bwd
from mamba_ssm.ops.norm.gated_parts import gated_norm_forward as _layer_norm_fwd
from mamba_ssm.ops.ssd import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    ssd_chunk_scan_combined_ref,
    ssd_selective_scan,
)
from mamba_ssm.ops.ssd.chunk_gradients import scan_and_state_backward_dx as _chunk_scan_chunk_state_bwd_dx
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dA_of_states as _chunk_scan_bwd_ddAcs_prev
from mamba_ssm.ops.ssd.combined_parts import combined_backward as _mamba_chunk_scan_combined_bwd
from mamba_ssm.ops.ssd.combined_parts import combined_forward as _mamba_chunk_scan_combined_fwd
from mamba_ssm.ops.ssd.combined_parts import selective_scan_backward as selective_scan_bwd
from mamba_ssm.ops.triton.ssd_chunk_scan import chunk_scan, chunk_scan_ref

__all__ = [
    "MambaChunkScanCombinedFn",
    "MambaSplitConv1dScanCombinedFn",
    "_chunk_scan_bwd_ddAcs_prev",
    "_chunk_scan_chunk_state_bwd_dx",
    "_layer_norm_bwd",
    "_layer_norm_fwd",
    "_mamba_chunk_scan_combined_bwd",
    "_mamba_chunk_scan_combined_fwd",
    "_swiglu_bwd",
    "_swiglu_fwd",
    "chunk_scan",
    "chunk_scan_ref",
    "ensure_stride",
    "init_to_zero",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_conv1d_scan_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
    "rmsnorm_fn",
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


def ensure_stride(inp: torch.Tensor) -> torch.Tensor:
    """inp (B, L, D), copied unless its stride along L is a multiple of 8, which the compiled causal-conv1d needs. This
    package's convolution takes any strides.
    """
    return inp if inp.stride(1) % 8 == 0 else inp.contiguous()


if not typing.TYPE_CHECKING:
    _INSTEAD = {"_chunk_scan_chunk_state_bwd_dx_kernel": "_chunk_scan_chunk_state_bwd_dx"}
    __getattr__ = kernels(__name__, _INSTEAD)
