"""Upstream's import path; the code is plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.step_parts import angle_dt_bwd, angle_dt_fwd

__all__ = ["angle_dt_bwd", "angle_dt_fwd"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {"angle_dt_fwd_kernel": "angle_dt_fwd", "angle_dt_bwd_kernel": "angle_dt_bwd"}
    __getattr__ = kernels(__name__, _INSTEAD)
