"""Upstream's import path; the code is this package's own scan, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.combined import mamba3_siso_step

__all__ = ["mamba3_siso_step"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {"mamba3_siso_step_kernel": "mamba3_siso_step"}
    __getattr__ = kernels(__name__, _INSTEAD)
