"""Mamba-3's scan under upstream's names and in its layouts, for code that calls these: the work is mamba3_scan's."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm.ops.mamba3_scan.forward import mamba3_scan

_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def mamba3_siso_combined(
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
    Input_States: _States | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mamba-3's SISO scan, mamba3_scan with a rank of 1.

    Args:
        Q, K: (B, L, G, N), normed. V, Z: (B, L, H, P). Q, K and Z are cast to V's dtype. ADT, DT, Trap: (B, H, L), Trap
            before the sigmoid.
        Q_bias, K_bias: (H, N). Angles: (B, L, H, S), before tanh. D: (H).
        Input_States: angle (U, H, S), ssm (U, H, P, N), k (U, H, N), v (U, H, P), or None.
        chunk_size: no effect.

    Returns:
        out (B, L, H, P) of V's dtype; with return_final_states also the four final states, v of V's dtype, the others
        float32.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_combined.mamba3_siso_combined, which rounds to bfloat16.
    """
    op = "mamba3_siso_combined"
    for name, tensor in ("Q", Q), ("K", K):
        checks.check_dims(op, name, tensor, 4, "(B, L, G, N)")
    for name, tensor in ("Q_bias", Q_bias), ("K_bias", K_bias):
        checks.check_dims(op, name, tensor, 2, "(H, N)")
    ADT, DT, Trap = (_by_step(op, *given) for given in (("ADT", ADT), ("DT", DT), ("Trap", Trap)))
    Q, K, Z = _as_values(op, V, Q, K, Z)
    if Input_States is not None:
        if len(Input_States) != 4:
            raise ValueError(f"{op}: Input_States must be four tensors or None, got {len(Input_States)}")
        angle, ssm, k, v = Input_States
        checks.check_dims(op, "Input_States[2]", k, 3, "(U, H, N)")
        Input_States = angle, ssm, k.unsqueeze(1), v
    results: typing.Any = mamba3_scan(
        Q.unsqueeze(2), K.unsqueeze(2), V, ADT, DT, Trap, Q_bias.unsqueeze(1), K_bias.unsqueeze(1), Angles, D, Z,
        initial_states=Input_States, cu_seqlens=cu_seqlens, return_final_states=return_final_states,
    )  # fmt: skip
    if not return_final_states:
        return results.squeeze(2)
    out, (angle, ssm, k, v) = results
    return out.squeeze(2), angle, ssm, k.squeeze(1), v.to(V.dtype)


def mamba3_mimo(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    ADT: torch.Tensor,
    DT: torch.Tensor,
    Trap: torch.Tensor,
    Q_bias: torch.Tensor,
    K_bias: torch.Tensor,
    MIMO_V: torch.Tensor,
    MIMO_Z: torch.Tensor | None,
    MIMO_Out: torch.Tensor | None,
    Angles: torch.Tensor,
    D: torch.Tensor | None,
    Z: torch.Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: float,
    dtype: torch.dtype | None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: torch.Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mamba-3's MIMO scan, mamba3_scan with the pairs (i, i + N / 2).

    Args:
        Q, K: (B, L, R, G, N), normed. V, Z: (B, L, H, P). Q, K and Z are cast to V's dtype. ADT, DT, Trap: (B, H, L),
            Trap before the sigmoid.
        Q_bias, K_bias: (H, R, N). MIMO_V, MIMO_Z, MIMO_Out: (H, R, P). Angles: (B, L, H, S), before tanh. D: (H).
        chunk_size, rotary_dim_divisor, dtype: no effect. Angles says how many there are, V the dtype of results.
        fuse_pregate_headwise_rms_norm: RMSNorm of each head before the gate, with outproj_norm_weight (H, P) or (H P),
            ones if None.

    Returns:
        out (B, L, H, P) of V's dtype, without MIMO_Out (B, L, R, H, P); with return_state also angle (U, H, S), ssm
        (U, H, P, N), k (U, R, H, N) and v (U, H, P), v of V's dtype, the others float32.

    Same as upstream's mamba_ssm.ops.tilelang.mamba3.mamba3_mimo.mamba3_mimo, whose packed v is wrong.
    """
    ADT, DT, Trap = (_by_step("mamba3_mimo", *given) for given in (("ADT", ADT), ("DT", DT), ("Trap", Trap)))
    Q, K, Z = _as_values("mamba3_mimo", V, Q, K, Z)
    norm_weight = None
    if fuse_pregate_headwise_rms_norm:
        heads = V.shape[-2:]
        norm_weight = V.new_ones(heads) if outproj_norm_weight is None else outproj_norm_weight.reshape(heads)
    results: typing.Any = mamba3_scan(
        Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, MIMO_V, MIMO_Z, MIMO_Out, norm_weight, outproj_norm_eps,
        cu_seqlens=cu_seqlens, pairwise=False, return_final_states=return_state,
    )  # fmt: skip
    if not return_state:
        return results
    out, (angle, ssm, k, v) = results
    return out, angle, ssm, k, v.to(V.dtype)


def mamba3_siso_step(
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
    Input_States: _States | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """mamba3_siso_combined without L: Q, K (B, G, N), V, Z (B, H, P), ADT, DT, Trap (B, H), Angles (B, H, S).

    Returns out (B, H, P) and the four states, which are new. Input_States are required.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_step.mamba3_siso_step.
    """
    if Input_States is None:
        raise ValueError("mamba3_siso_step: Input_States must be the four states before the step, got None")
    results: typing.Any = mamba3_siso_combined(
        Q.unsqueeze(1),
        K.unsqueeze(1),
        V.unsqueeze(1),
        ADT.unsqueeze(-1),
        DT.unsqueeze(-1),
        Trap.unsqueeze(-1),
        Q_bias,
        K_bias,
        Angles.unsqueeze(1),
        D,
        None if Z is None else Z.unsqueeze(1),
        Input_States,
        return_final_states=True,
    )
    out, *states = results
    return out.squeeze(1), states


def _as_values(op, V, *tensors):
    """In V's dtype. Upstream takes them in any, and rounds them to one."""
    checks.check_dims(op, "V", V, 4, "(B, L, H, P)")
    return (checks.cast(tensor, V.dtype) for tensor in tensors)


def _by_step(op, name, tensor):
    """(B, H, L) as (B, L, H)."""
    checks.check_dims(op, name, tensor, 3, "(B, H, L)")
    return tensor.transpose(1, 2)
