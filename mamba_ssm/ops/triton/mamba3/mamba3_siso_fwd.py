"""Upstream's import path; the code is plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.siso_parts import siso_forward as mamba3_siso_fwd

__all__ = ["mamba3_siso_fwd"]

if not typing.TYPE_CHECKING:
    __getattr__ = kernels(__name__, {"mamba3_siso_fwd_kernel": "mamba3_siso_fwd"})
