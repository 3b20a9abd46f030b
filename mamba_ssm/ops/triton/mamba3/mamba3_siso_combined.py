"""Upstream's import path; the code is this package's own scan, triton is never imported."""

from dataclasses import dataclass

import torch

from mamba_ssm.ops.mamba3_scan.combined import mamba3_siso_combined

__all__ = ["Mamba3Output", "mamba3_siso_combined"]


@dataclass
class Mamba3Output:
    """mamba3_siso_combined's results by name: Mamba3Output(*mamba3_siso_combined(..., return_final_states=True))."""

    out: torch.Tensor
    final_angle_state: torch.Tensor | None = None
    final_ssm_state: torch.Tensor | None = None
    final_k_state: torch.Tensor | None = None
    final_v_state: torch.Tensor | None = None
