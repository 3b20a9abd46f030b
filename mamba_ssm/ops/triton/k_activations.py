"""Upstream's import path; the code is native, triton is never imported."""

import typing

from mamba_ssm._upstream import AutogradFunction, kernels
from mamba_ssm.ops.norm import swiglu
from mamba_ssm.ops.norm import swiglu_backward as _swiglu_bwd
from mamba_ssm.ops.norm import swiglu_forward as _swiglu_fwd

__all__ = ["SwiGLU", "_swiglu_bwd", "_swiglu_fwd", "swiglu"]


class SwiGLU(AutogradFunction):
    """swiglu by the name of upstream's autograd.Function."""

    apply = staticmethod(swiglu)
    gradients = 1


if not typing.TYPE_CHECKING:
    _INSTEAD = {"_swiglu_fwd_kernel": "_swiglu_fwd", "_swiglu_bwd_kernel": "_swiglu_bwd"}
    __getattr__ = kernels(__name__, _INSTEAD)
