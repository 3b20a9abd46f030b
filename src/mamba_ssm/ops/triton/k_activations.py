"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.norm import swiglu
from mamba_ssm.ops.norm import swiglu_backward as _swiglu_bwd
from mamba_ssm.ops.norm import swiglu_forward as _swiglu_fwd

__all__ = ["_swiglu_bwd", "_swiglu_fwd", "swiglu"]
