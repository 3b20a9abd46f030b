"""One decoding step of Mamba-3: the scan of one token, with the states updated in place."""

import typing

import torch

from mamba_ssm.ops.mamba3_scan.arguments import States
from mamba_ssm.ops.mamba3_scan.forward import mamba3_scan


@torch.no_grad()
def mamba3_step(
    states: States,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    ADT: torch.Tensor,
    DT: torch.Tensor,
    Trap: torch.Tensor,
    Q_bias: torch.Tensor,
    K_bias: torch.Tensor,
    Angles: torch.Tensor,
    D: torch.Tensor | None = None,
    Z: torch.Tensor | None = None,
    MIMO_V: torch.Tensor | None = None,
    MIMO_Z: torch.Tensor | None = None,
    MIMO_Out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    pairwise: bool = True,
) -> torch.Tensor:
    """One step: mamba3_scan's arguments without L, and states of any of its dtypes, which are updated in place.

    Returns out (B, H, P), without MIMO_Out (B, R, H, P). No gradient is recorded.
    """
    Q, K, V, ADT, DT, Trap, Angles = (tensor.unsqueeze(1) for tensor in (Q, K, V, ADT, DT, Trap, Angles))
    Z = None if Z is None else Z.unsqueeze(1)
    results: typing.Any = mamba3_scan(
        Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, MIMO_V, MIMO_Z, MIMO_Out, norm_weight, norm_eps,
        States(*states), pairwise=pairwise, return_final_states=True,
    )  # fmt: skip
    out, finals = results
    for state, final in zip(states, finals, strict=True):
        state.copy_(final)
    return out.squeeze(1)
