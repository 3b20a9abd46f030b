"""Upstream's import path; the code is plain torch, CuTe is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.step_parts import mamba3_step_fn

__all__ = ["mamba3_step_fn"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {"Mamba3Step": "mamba3_step_fn"}
    __getattr__ = kernels(__name__, _INSTEAD, "CuTe")
