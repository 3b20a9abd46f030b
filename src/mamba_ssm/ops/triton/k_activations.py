"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.norm.swiglu import _swiglu_bwd, _swiglu_fwd, swiglu

__all__ = ["_swiglu_bwd", "_swiglu_fwd", "swiglu"]
