"""Upstream's import path; the code is plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.mamba3_scan.siso_parts import siso_backward_gate as compute_dzdo
from mamba_ssm.ops.mamba3_scan.siso_parts import siso_backward_last_k as apply_dk_state_post
from mamba_ssm.ops.mamba3_scan.siso_parts import siso_backward_rotation as compute_dqktheta
from mamba_ssm.ops.mamba3_scan.siso_parts import siso_backward_scan as compute_dqkv
from mamba_ssm.ops.mamba3_scan.siso_parts import siso_backward_steps as compute_ddt_dtrap_dinput_states

__all__ = [
    "apply_dk_state_post",
    "compute_ddt_dtrap_dinput_states",
    "compute_dqktheta",
    "compute_dqkv",
    "compute_dzdo",
]

if not typing.TYPE_CHECKING:
    _INSTEAD = {
        "mamba3_siso_bwd_kernel_dzdo": "compute_dzdo",
        "mamba3_siso_bwd_kernel_dqkv": "compute_dqkv",
        "mamba3_siso_bwd_kernel_rotary_bias_angles": "compute_dqktheta",
        "mamba3_siso_bwd_kernel_dk_state_post": "apply_dk_state_post",
        "mamba3_siso_bwd_kernel_ddt_dtrap_dinput_states": "compute_ddt_dtrap_dinput_states",
    }
    __getattr__ = kernels(__name__, _INSTEAD)
