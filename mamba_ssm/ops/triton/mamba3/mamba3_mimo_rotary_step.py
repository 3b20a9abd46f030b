"""Upstream's import path; the code is plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.step_parts import (
    apply_rotary_qk_inference_fwd,
    apply_rotary_qk_inference_reference,
)

__all__ = ["apply_rotary_qk_inference_fwd", "apply_rotary_qk_inference_reference"]

if not typing.TYPE_CHECKING:
    _INSTEAD = {"rotary_qk_inference_kernel": "apply_rotary_qk_inference_fwd"}
    __getattr__ = kernels(__name__, _INSTEAD)
