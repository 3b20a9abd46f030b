"""Mamba-3's scan (arXiv 2603.15569), single-input (SISO, rank 1) and multi-input (MIMO): the public function."""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import autocast_dtype, make, no_autocast, values_at_hand
from mamba_ssm.ops.mamba3_scan.arguments import NAME, Inputs, Options, States, check
from mamba_ssm.ops.mamba3_scan.chunks import scan_chunks
from mamba_ssm.ops.mamba3_scan.packed import scan_packed


def mamba3_scan(
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
    initial_states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pairwise: bool = True,
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, States]:
    """Mamba-3's scan, with gradients of every floating-point argument. A step of a head, lambda = sigmoid(Trap):

        angle = (angle + pi tanh(Angles) DT) mod 2 pi
        q_r = turn(Q_r + Q_bias_r, angle);  k'_r = turn(K_r + K_bias_r, angle)
        h = exp(ADT) (h + (1 - lambda) DT sum_r (MIMO_V_r v) k_r^T) + lambda DT sum_r (MIMO_V_r V) k'_r^T
        y_r = h q_r + D (MIMO_V_r V);  k = k';  v = V
        y_r = y_r / sqrt(mean(y_r^2) + norm_eps) norm_weight, if that is given
        out = sum_r MIMO_Out_r y_r silu(MIMO_Z_r Z)

    Letters: B batch, L length, R rank, H heads, P headdim, G groups, N dstate, S angles, U sequences (B, or those that
    cu_seqlens bounds).

    Args:
        Q, K: (B, L, R, G, N) of V's dtype, where G divides H: H / G neighbouring heads share a group. N is 1..256.
        V, Z: (B, L, H, P) of one dtype: float32, float16 or bfloat16. P is 1..256. Without Z there is no gate.
        ADT, DT, Trap: (B, L, H) of any of these dtypes and any strides. ADT and DT are independent inputs.
        Q_bias, K_bias: (H, R, N) float32 (as every parameter, widened if it comes narrower).
        Angles: (B, L, H, S), or (B, L, S) for all heads, S <= N / 2.
        D: (H). MIMO_V, MIMO_Z, MIMO_Out: (H, R, P), ones if None, but see the result. norm_weight: (H, P).
        initial_states: angle (U, H, S), ssm (U, H, P, N), k (U, R, H, N), v (U, H, P), as they are returned; zero if
            None.
        seq_idx: (B, L) int32; the states restart from zero at each step whose value differs from the step before.
        cu_seqlens: (U + 1) int32: 0, where the other sequences packed in the one row of a batch of 1 begin, and the end
            of the last. Outputs of steps behind it are zero.
        pairwise: an angle turns the entries (2i, 2i + 1) of Q and K, as SISO has it; False: (i, i + N // 2), as MIMO.
        return_final_states: also return the states after the last step, with seq_idx of each row's last sequence.

    Returns:
        out (B, L, H, P) of V's dtype, without MIMO_Out (B, L, R, H, P); or a tuple of it and States, float32. Gradients
        flow into initial_states and out of the final ones. Arithmetic is float32.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, a device or a value is wrong.

    It runs on the operators of torch, chunk by chunk; a native kernel does not exist yet. On a GPU packed sequences
    cost a synchronisation and a scan each.
    """
    if initial_states is None:
        states: tuple[torch.Tensor | None, ...] = (None,) * 4
    elif len(initial_states) == 4:
        states = tuple(map(checks.widen, initial_states))
    else:
        raise ValueError(f"{NAME}: initial_states must be four tensors or None, got {len(initial_states)}")
    if isinstance(V, torch.Tensor) and autocast_dtype(V) is not None:  # which leaves some inputs wider: norms' outputs
        Q, K, Z = (checks.cast(tensor, V.dtype) for tensor in (Q, K, Z))
    parameters = map(checks.widen, (D, MIMO_V, MIMO_Z, MIMO_Out, norm_weight))
    D, MIMO_V, MIMO_Z, MIMO_Out, norm_weight = parameters
    biases = checks.widen(Q_bias), checks.widen(K_bias)
    tensors = Q, K, V, ADT, DT, Trap, *biases, Angles, D, Z, MIMO_V, MIMO_Z, MIMO_Out, norm_weight
    inputs = make(Inputs, (*tensors, *states, seq_idx, cu_seqlens))
    check(inputs)
    if cu_seqlens is not None and values_at_hand(cu_seqlens):
        checks.check_bounds(NAME, cu_seqlens.tolist(), V.shape[1])
    options = Options(bool(pairwise), checks.check_number(NAME, "norm_eps", norm_eps))
    with no_autocast(V):
        out, final_states = scan_packed(scan_chunks, inputs, options)
    return (out, final_states) if return_final_states else out
