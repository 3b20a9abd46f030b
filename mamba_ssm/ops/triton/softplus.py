"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.norm import softplus

__all__ = ["softplus"]
