"""Upstream's import path; the pieces are plain torch, triton is never imported."""

import typing

import torch

from mamba_ssm._upstream import AutogradFunction, init_to_zero, kernels
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dA_of_products as _chunk_scan_bwd_ddAcs_stable
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dA_of_states as _chunk_scan_bwd_ddAcs_prev
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dA_unstable as _chunk_scan_bwd_ddAcs_unstable
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dC as _chunk_scan_bwd_dC
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dcb as _chunk_scan_bwd_dcb
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dstates as _chunk_scan_bwd_dstates
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dx as _chunk_scan_bwd_dx
from mamba_ssm.ops.ssd.chunk_gradients import scan_backward_dz as _chunk_scan_bwd_dz
from mamba_ssm.ops.ssd.chunk_gradients import scan_forward as _chunk_scan_fwd
from mamba_ssm.ops.ssd.chunks import chunk_scan

chunk_scan_ref = chunk_scan
_chunk_scan_bwd_ddAcs_stable_old = _chunk_scan_bwd_ddAcs_stable

__all__ = [
    "ChunkScanFn",
    "_chunk_scan_bwd_dC",
    "_chunk_scan_bwd_dcb",
    "_chunk_scan_bwd_ddAcs_prev",
    "_chunk_scan_bwd_ddAcs_stable",
    "_chunk_scan_bwd_ddAcs_stable_old",
    "_chunk_scan_bwd_ddAcs_unstable",
    "_chunk_scan_bwd_dstates",
    "_chunk_scan_bwd_dx",
    "_chunk_scan_bwd_dz",
    "_chunk_scan_fwd",
    "_chunk_scan_fwd_wip",
    "chunk_scan",
    "chunk_scan_ref",
    "init_to_zero",
]


class ChunkScanFn(AutogradFunction):
    """chunk_scan by the name of upstream's autograd.Function."""

    apply = staticmethod(chunk_scan)
    gradients = 8


def _chunk_scan_fwd_wip(
    cb: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    C: torch.Tensor,
    B: torch.Tensor,
    states: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """_chunk_scan_fwd; B is in cb."""
    return _chunk_scan_fwd(cb, x, dt, dA_cumsum, C, states, D, z, seq_idx)


if not typing.TYPE_CHECKING:
    _NAMES = ("fwd", "bwd_dz", "bwd_dstates", "bwd_dx", "bwd_dcb", "bwd_ddAcs_unstable", "bwd_ddAcs_stable")
    _INSTEAD = {f"_chunk_scan_{name}_kernel": f"_chunk_scan_{name}" for name in (*_NAMES, "bwd_ddAcs_prev")}
    _INSTEAD["_chunk_scan_fwd_kernel_wip"] = "_chunk_scan_fwd_wip"
    _INSTEAD["_chunk_scan_bwd_ddAcs_stable_kernel_old"] = "_chunk_scan_bwd_ddAcs_stable_old"
    _INSTEAD["_chunk_scan_bwd_dc_kernel"] = "_chunk_scan_bwd_dC"
    __getattr__ = kernels(__name__, _INSTEAD)
