"""Upstream's import path; the pieces are plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import init_to_zero, kernels
from mamba_ssm.ops.ssd.chunk_gradients import products_backward as _bmm_chunk_bwd
from mamba_ssm.ops.ssd.chunk_gradients import products_forward as _bmm_chunk_fwd

__all__ = ["_bmm_chunk_bwd", "_bmm_chunk_fwd", "init_to_zero"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {"_bmm_chunk_fwd_kernel": "_bmm_chunk_fwd", "_bmm_chunk_bwd_kernel": "_bmm_chunk_bwd"}
    __getattr__ = kernels(__name__, _INSTEAD)
