"""Upstream's import path; the code is this package's own scan, tilelang is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.mimo_parts import mimo_backward_varlen as mamba_mimo_bwd_combined_varlen

__all__ = ["mamba_mimo_bwd_combined_varlen"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {
        "mamba_mimo_bwd_fwd": "mamba_mimo_bwd_combined_varlen",
        "mamba_mimo_bwd_bwd": "mamba_mimo_bwd_combined_varlen",
    }
    __getattr__ = kernels(__name__, _INSTEAD, "tilelang")
