"""Upstream's import path; the code is this package's own scan, tilelang is never imported."""

from mamba_ssm._upstream import AutogradFunction
from mamba_ssm.ops.mamba3_scan.combined import mamba3_mimo

__all__ = ["mamba3_mimo"]


class _Mamba3Function(AutogradFunction):
    """mamba3_mimo by the name of upstream's autograd.Function."""

    apply = staticmethod(mamba3_mimo)
    gradients = 19
