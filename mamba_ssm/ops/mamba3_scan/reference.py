"""Mamba-3's scan in plain torch, one step after the other: the truth that the tests compare with (arXiv 2603.15569).

It computes in float32, or in float64 where V is float64, and is differentiable any number of times.
Letters: B batch, L length, R rank, H heads, P headdim, G groups, N dstate, S angles.
"""

import math

import torch

from mamba_ssm._torch import make
from mamba_ssm.ops.mamba3_scan.arguments import Inputs, Options, States
from mamba_ssm.ops.mamba3_scan.chunks import scan_chunks
from mamba_ssm.ops.mamba3_scan.packed import scan_packed
from mamba_ssm.ops.mamba3_scan.parts import (
    angle_steps,
    finish,
    in_working_dtype,
    outer,
    per_head,
    project,
    rotate,
    zero_states,
)


def mamba3_scan_ref(
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
    chunked: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, States]:
    """Mamba-3's scan, step by step, or chunk by chunk; the other arguments and the results are mamba3_scan's. It looks
    at the values of seq_idx and cu_seqlens, which on a GPU is a synchronisation.
    """
    states = (None,) * 4 if initial_states is None else initial_states
    tensors = Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, MIMO_V, MIMO_Z, MIMO_Out, norm_weight
    inputs = make(Inputs, (*tensors, *states, seq_idx, cu_seqlens))
    out, final_states = scan_packed(scan_chunks if chunked else _steps, inputs, Options(pairwise, norm_eps))
    return (out, final_states) if return_final_states else out


def _steps(inputs, options):
    inputs = in_working_dtype(inputs)
    Q, K, V, DT = inputs.Q, inputs.K, inputs.V, inputs.DT
    heads = V.shape[2]
    Q = per_head(Q, heads) + inputs.Q_bias.transpose(0, 1)
    K = per_head(K, heads) + inputs.K_bias.transpose(0, 1)
    turn = angle_steps(inputs)
    decay, lam = torch.exp(inputs.ADT), torch.sigmoid(inputs.Trap)
    angle, state, k, v = inputs.states or zero_states(inputs)
    rows = []
    for t in range(V.shape[1]):
        before = project(v, inputs.MIMO_V, k.shape[1])
        angle = torch.remainder(angle + turn[:, t], 2 * math.pi)
        q, k_before = rotate(Q[:, t], angle[:, None], options.pairwise), k
        k, v = rotate(K[:, t], angle[:, None], options.pairwise), V[:, t]
        x = project(v, inputs.MIMO_V, k.shape[1])
        gamma, nu = (weight[..., None, None] for weight in (lam[:, t] * DT[:, t], (1 - lam[:, t]) * DT[:, t]))
        state = decay[:, t, :, None, None] * (state + nu * outer(before, k_before)) + gamma * outer(x, k)
        y = torch.einsum("bhpn,brhn->brhp", state, q)
        rows.append(y if inputs.D is None else y + inputs.D[:, None] * x)
    y = torch.stack(rows, 1) if rows else V.new_empty(V.shape[0], 0, k.shape[1], *V.shape[2:])
    return finish(y, inputs, options), States(angle, state, k, v)
