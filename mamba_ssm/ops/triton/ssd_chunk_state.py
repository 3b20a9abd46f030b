"""Upstream's import path; the pieces are plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import AutogradFunction, init_to_zero, kernels
from mamba_ssm.ops.ssd.chunk_gradients import cumsum_backward as _chunk_cumsum_bwd
from mamba_ssm.ops.ssd.chunk_gradients import state_backward_dA as _chunk_state_bwd_ddAcs_stable
from mamba_ssm.ops.ssd.chunk_gradients import state_backward_db as _chunk_state_bwd_db
from mamba_ssm.ops.ssd.chunk_gradients import state_backward_dx as _chunk_state_bwd_dx
from mamba_ssm.ops.ssd.chunks import chunk_cumsum as _chunk_cumsum_fwd
from mamba_ssm.ops.ssd.chunks import chunk_state, chunk_state_varlen
from mamba_ssm.ops.ssd.chunks import chunk_state_forward as _chunk_state_fwd

chunk_state_ref = chunk_state

__all__ = [
    "ChunkStateFn",
    "_chunk_cumsum_bwd",
    "_chunk_cumsum_fwd",
    "_chunk_state_bwd_db",
    "_chunk_state_bwd_ddAcs_stable",
    "_chunk_state_bwd_dx",
    "_chunk_state_fwd",
    "chunk_state",
    "chunk_state_ref",
    "chunk_state_varlen",
    "init_to_zero",
]


class ChunkStateFn(AutogradFunction):
    """chunk_state by the name of upstream's autograd.Function."""

    apply = staticmethod(chunk_state)
    gradients = 5


if not typing.TYPE_CHECKING:
    _NAMES = (
        "_chunk_cumsum_fwd",
        "_chunk_cumsum_bwd",
        "_chunk_state_fwd",
        "_chunk_state_bwd_dx",
        "_chunk_state_bwd_db",
    )
    _NAMES += ("_chunk_state_bwd_ddAcs_stable",)
    _INSTEAD = {f"{name}_kernel": name for name in _NAMES}
    __getattr__ = kernels(__name__, _INSTEAD | {"_chunk_state_varlen_kernel": "chunk_state_varlen"})
