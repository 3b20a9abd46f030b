"""Upstream's import path; the pieces are plain torch, triton is never imported."""

from mamba_ssm.ops.ssd.chunks import chunk_cumsum as _chunk_cumsum_fwd
from mamba_ssm.ops.ssd.chunks import chunk_state, chunk_state_varlen
from mamba_ssm.ops.ssd.chunks import chunk_state_forward as _chunk_state_fwd

chunk_state_ref = chunk_state

__all__ = ["_chunk_cumsum_fwd", "_chunk_state_fwd", "chunk_state", "chunk_state_ref", "chunk_state_varlen"]
