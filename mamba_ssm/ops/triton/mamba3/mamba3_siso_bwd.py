"""Upstream's import path; the code is this package's own scan, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.combined import mamba3_siso_combined

__all__ = ["mamba3_siso_combined"]

if not typing.TYPE_CHECKING:
    _NAMES = ("compute_dzdo", "compute_dqkv", "compute_dqktheta", "apply_dk_state_post")
    _NAMES += ("compute_ddt_dtrap_dinput_states",)
    _KERNELS = ("dzdo", "dqkv", "rotary_bias_angles", "dk_state_post", "ddt_dtrap_dinput_states")
    _NAMES += tuple(f"mamba3_siso_bwd_kernel_{name}" for name in _KERNELS)
    __getattr__ = kernels(__name__, dict.fromkeys(_NAMES, "mamba3_siso_combined"))
