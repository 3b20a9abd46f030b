"""Upstream's import path; the code is this package's own scan, triton is never imported."""

import typing
from dataclasses import dataclass

import torch

from mamba_ssm._upstream import AutogradFunction
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


def _flat(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    ADT: torch.Tensor,
    DT: torch.Tensor,
    Trap: torch.Tensor,
    Q_bias: torch.Tensor,
    K_bias: torch.Tensor,
    Angles: torch.Tensor,
    D: torch.Tensor | None,
    Z: torch.Tensor | None,
    Input_Angle_State: torch.Tensor | None,
    Input_SSM_State: torch.Tensor | None,
    Input_K_State: torch.Tensor | None,
    Input_V_State: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    return_final_states: bool,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """mamba3_siso_combined with the arguments of _Mamba3Function."""
    states: typing.Any = (Input_Angle_State, Input_SSM_State, Input_K_State, Input_V_State)
    if any(state is None for state in states):
        if any(state is not None for state in states):
            raise ValueError("mamba3_siso_combined: the four input states must be given together, or none of them")
        states = None
    rest = Q_bias, K_bias, Angles, D, Z, states, chunk_size, return_final_states, cu_seqlens
    return mamba3_siso_combined(Q, K, V, ADT, DT, Trap, *rest)


class _Mamba3Function(AutogradFunction):
    """mamba3_siso_combined by the name of upstream's autograd.Function."""

    apply = staticmethod(_flat)
    gradients = 18
