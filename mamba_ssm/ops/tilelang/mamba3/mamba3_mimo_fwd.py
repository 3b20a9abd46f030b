"""Upstream's import path; the code is this package's own scan, tilelang is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.mimo_parts import mimo_forward as mamba_mimo_forward

__all__ = ["mamba_mimo_forward"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {"mamba_mimo_fwd": "mamba_mimo_forward"}
    __getattr__ = kernels(__name__, _INSTEAD, "tilelang")
