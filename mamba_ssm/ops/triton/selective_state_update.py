"""Upstream's import path; the code is native, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.state_update import selective_state_update, selective_state_update_ref

__all__ = ["selective_state_update", "selective_state_update_ref"]

if not typing.TYPE_CHECKING:
    __getattr__ = kernels(__name__, {"_selective_scan_update_kernel": "selective_state_update"})
