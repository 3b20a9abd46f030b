"""The parts of Mamba-3's SISO scan in plain torch, under the names and in the layouts of upstream's kernels.

For code that calls these one by one: mamba3_siso_combined does all of it in native kernels. Gradients are autograd's,
of the functions below that they belong to.
Letters: B batch, L length, H heads, P headdim, G groups, N dstate, S angles, K chunks of Q steps, U sequences.
"""

import itertools
import math
import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops.mamba3_scan.chunk_parts import (
    chunk_places,
    factors,
    into_chunks,
    out_of_chunks,
    steps_of_sums,
    sums_in_chunks,
)
from mamba_ssm.ops.mamba3_scan.parts import per_head, rotate

_LOG2E = math.log2(math.e)  # upstream's sums of decays are logarithms to the base 2
_Optional = torch.Tensor | None


def siso_forward(
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
    Initial_States: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    chunk_size: int = 64,
    store_states_adt_outv: bool = False,
    return_final_states: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[typing.Any, ...]:
    """mamba3_siso_combined without a gradient, of Angles (B, L, H, S) that are summed, and what its backward reads.

    Args: mamba3_siso_combined's, but Initial_States are ssm, k and v alone.

    Returns:
        out (B, L, H, P) of V's dtype; with store_states_adt_outv, else None: out before the gate, the states that enter
        each chunk (B, H, P, K N) of V's dtype, the sums of ADT log2(e) within chunks (B, H, L) and of each (B, H, K);
        then Q, and K times scale, biased and rotated, (B, L, H, N) of their dtypes; Q K gamma, scale and gamma
        (B, H, L) float32; with return_final_states (ssm, k, v), else None.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd.mamba3_siso_fwd.
    """
    checks.check_dims("mamba3_siso_fwd", "V", V, 4, "(B, L, H, P)")
    bounds = _bounds(V.shape[0], V.shape[1], cu_seqlens)
    start, k_before, v_before = (None,) * 3 if Initial_States is None else Initial_States
    with torch.no_grad():
        gamma, scale = factors(Trap.float(), DT.float(), cu_seqlens)
        q, k, scaled, products = _prepare(Q, K, Q_bias, K_bias, Angles, scale, gamma)
        first = _start(start, k_before, v_before, DT, Trap, bounds)
        given = q, scaled, V, ADT, products, D
        ungated, entering, last, sums, totals = _scan(*given, first, chunk_size, cu_seqlens)
        out = ungated if Z is None else ungated * F.silu(Z.float())
        finals = None
        if return_final_states:
            finals = last, _last(k, bounds, k_before), _last(V, bounds, v_before)
        stored: tuple[_Optional, ...] = (None,) * 4
        if store_states_adt_outv:
            states = entering.permute(0, 2, 3, 1, 4).flatten(3).to(V.dtype)
            stored = ungated.to(V.dtype), states, sums * _LOG2E, totals * _LOG2E
    return out.to(V.dtype), *stored, q.to(Q.dtype), scaled.to(K.dtype), products, scale, gamma, finals


def siso_backward_gate(
    do: torch.Tensor, z: torch.Tensor, o: torch.Tensor, chunk_size: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dz, do times silu(z)), (B, L, H, P) of do's dtype, of o silu(z). chunk_size has no effect.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd.compute_dzdo.
    """
    for name, tensor in (("z", z), ("o", o)):
        checks.check_float("compute_dzdo", name, tensor, do.shape, do, "do", "(B, L, H, P)")
    dz, scaled = _gradients((z, o), lambda gate, ungated: ungated * F.silu(gate), (do,))
    return dz.to(do.dtype), scaled.to(do.dtype)


def siso_backward_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    da_cs: torch.Tensor,
    da_cs_sum: torch.Tensor,
    qk_dot: torch.Tensor,
    SSM_States: torch.Tensor,
    do: torch.Tensor,
    d_ossm_state: torch.Tensor | None = None,
    d_ov_state: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    chunk_size: int = 64,
    has_input_state: bool = False,
    Cu_Seqlens: torch.Tensor | None = None,
) -> tuple[_Optional, ...]:
    """(dq, dk, dv, dADT, dqk_dot, dD, d_ssm) from the gradients of siso_forward's ungated output and final states.

    q, k, v, da_cs, qk_dot and SSM_States as siso_forward returns them. da_cs_sum follows from da_cs and is not read.
    dADT and dqk_dot (B, H, L) float32; d_ssm (U, H, P, N) float32 is of the state that enters the first chunk, None
    without has_input_state.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd.compute_dqkv.
    """
    bounds = _bounds(v.shape[0], v.shape[1], Cu_Seqlens)
    decays = steps_of_sums(da_cs.float() / _LOG2E, chunk_size, Cu_Seqlens)
    states = SSM_States.unflatten(3, (-1, q.shape[-1])).permute(0, 3, 1, 2, 4).float()
    starts = [states.new_zeros(states.shape[2:])] * len(bounds)
    for row, (batch, begin, end) in enumerate(bounds):
        if end > begin:
            starts[row] = states[batch, begin // chunk_size + (0 if Cu_Seqlens is None else row)]

    def scan(q, k, v, decays, products, start, *D):
        ungated, _, last, *_ = _scan(q, k, v, decays, products, D[0] if D else None, start, chunk_size, Cu_Seqlens)
        return ungated, last, _last(v, bounds)

    given = (q, k, v, decays, qk_dot, torch.stack(starts), *(() if D is None else (D,)))
    dq, dk, dv, dADT, dqk, dstart, *dD = _gradients(given, scan, (do, d_ossm_state, d_ov_state))
    return (
        dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dADT, dqk, dD[0] if dD else None,
        dstart if has_input_state else None,
    )  # fmt: skip


def siso_backward_rotation(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    gamma: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    angles: torch.Tensor,
    dq_in: torch.Tensor,
    dk_in: torch.Tensor,
    dqk: torch.Tensor,
    d_ok_state: torch.Tensor | None = None,
    chunk_size: int = 64,
    Cu_Seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dq_bias, dk_bias, dangles, dscale, dgamma) of siso_forward's Q and K as they came, from those of Q and K
    rotated (and K times scale), of Q K gamma and of the last k. chunk_size has no effect.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd.compute_dqktheta.
    """
    bounds = _bounds(q.shape[0], q.shape[1], Cu_Seqlens)

    def prepare(q, k, q_bias, k_bias, angles, scale, gamma):
        q, k, scaled, products = _prepare(q, k, q_bias, k_bias, angles, scale, gamma)
        return q, scaled, products, _last(k, bounds)

    given = q, k, q_bias, k_bias, angles, scale, gamma
    found = _gradients(given, prepare, (dq_in, dk_in, dqk, d_ok_state))
    kinds = dq_in.dtype, dk_in.dtype, torch.float32, torch.float32, angles.dtype, scale.dtype, gamma.dtype
    return tuple(gradient.to(kind) for gradient, kind in zip(found, kinds, strict=True))


def siso_backward_last_k(
    d_ok_state: torch.Tensor,
    angles: torch.Tensor,
    k: torch.Tensor,
    k_bias: torch.Tensor,
    dk: torch.Tensor,
    dk_bias: torch.Tensor,
    dangles: torch.Tensor,
    Cu_Seqlens: torch.Tensor | None = None,
) -> None:
    """Adds to dk, dk_bias and dangles, in place, what the gradient of the last k (U, H, N) gives them.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd.apply_dk_state_post.
    """
    bounds, heads = _bounds(k.shape[0], k.shape[1], Cu_Seqlens), angles.shape[2]

    def last(k, k_bias, angles):
        rotated = rotate(per_head(k[:, :, None], heads).squeeze(2) + k_bias, angles, True)
        return _last(rotated, bounds)

    found = _gradients((k, k_bias, angles), last, (d_ok_state,))
    with torch.no_grad():
        for total, gradient in zip((dk, dk_bias, dangles), found, strict=True):
            total += gradient.to(total.dtype)


def siso_backward_steps(
    dscale: torch.Tensor,
    dgamma: torch.Tensor,
    dt: torch.Tensor,
    trap: torch.Tensor,
    d_issm_state: torch.Tensor | None = None,
    input_k_state: torch.Tensor | None = None,
    input_v_state: torch.Tensor | None = None,
    Cu_Seqlens: torch.Tensor | None = None,
) -> tuple[_Optional, ...]:
    """(ddt, dtrap, dssm, dk, dv), float32, from the gradients of scale, gamma and, unless it is None, the state that
    enters the first chunk. Without it the last three, of the initial states, are None. trap is before the sigmoid.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd.compute_ddt_dtrap_dinput_states.
    """
    bounds = _bounds(dt.shape[0], dt.shape[2], Cu_Seqlens)

    def steps(dt, trap, *states):
        gamma, scale = factors(trap, dt, Cu_Seqlens)
        return scale, gamma, *([_start(*states, dt, trap, bounds)] if states else [])

    if d_issm_state is None:
        return (*_gradients((dt, trap), steps, (dscale, dgamma)), None, None, None)
    if input_k_state is None or input_v_state is None:
        raise ValueError(
            "compute_ddt_dtrap_dinput_states: d_issm_state needs input_k_state and input_v_state, got None"
        )
    given = dt, trap, torch.zeros_like(d_issm_state), input_k_state, input_v_state
    return _gradients(given, steps, (dscale, dgamma, d_issm_state))


# ---- what these are gradients of, in float32 -------------------------------------------------------------------------


def _gradients(given, function, cotangents):
    """Those of function(*given), whose results have these gradients, None for zero; float32."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in given]
    with torch.enable_grad():
        results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    pairs = [(out, grad.float()) for out, grad in zip(results, cotangents, strict=True) if grad is not None]
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    return tuple(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True))


def _bounds(batch, seqlen, cu_seqlens):
    """(row of the batch, first step, end) of each sequence."""
    if batch == 0 or (cu_seqlens is not None and len(cu_seqlens) < 2):
        raise ValueError(f"mamba3_siso: there must be a sequence, got a batch of {batch}, cu_seqlens {cu_seqlens}")
    if cu_seqlens is None:
        return [(row, 0, seqlen) for row in range(batch)]
    bounds = cu_seqlens.tolist()
    checks.check_bounds("mamba3_siso", bounds, seqlen)
    return [(0, begin, end) for begin, end in itertools.pairwise(bounds)]


def _prepare(q, k, q_bias, k_bias, angles, scale, gamma):
    """Q, K, K times scale (B, L, H, N), and Q K gamma (B, H, L), which a rotation of both does not change."""
    heads = angles.shape[2]
    q, k = (
        per_head(matrix.float()[:, :, None], heads).squeeze(2) + bias.float()
        for matrix, bias in ((q, q_bias), (k, k_bias))
    )
    products = (q * k).sum(-1).transpose(1, 2) * gamma
    q, k = (rotate(matrix, angles.float(), True) for matrix in (q, k))
    return q, k, k * scale.transpose(1, 2)[..., None], products


def _start(ssm, k, v, dt, trap, bounds):
    """The initial states (U, H, P, N) with what the first steps add of the k and v before them; None without."""
    if ssm is None:
        return None
    share = torch.sigmoid(-trap.float()) * dt.float()
    rows = [share[row, :, begin] if end > begin else torch.zeros_like(share[row, :, 0]) for row, begin, end in bounds]
    added = v.float()[..., None] * k.float()[..., None, :]
    return ssm.float() + torch.stack(rows)[..., None, None] * added


def _last(steps, bounds, before=None):
    """The last step of each sequence of (B, L, H, ...); `before`, or zero, of one that has none."""
    before = steps.new_zeros(len(bounds), *steps.shape[2:]) if before is None else before.to(steps.dtype)
    return torch.stack(
        [steps[row, end - 1] if end > begin else before[index] for index, (row, begin, end) in enumerate(bounds)]
    )


def _scan(q, k, v, decays, products, D, start, chunk_size, cu_seqlens):
    """q, k (B, L, H, N), v (B, L, H, P), decays and products (B, H, L), start (U, H, P, N) -> the output before the
    gate, the states that enter chunks (B, K, H, P, N), the final ones (U, H, P, N), and the sums of decays.
    """
    seqlen = v.shape[1]
    places, chunks = chunk_places(decays, chunk_size, cu_seqlens)
    bounds = _bounds(v.shape[0], seqlen, cu_seqlens)
    q_in, k_in, v_in = (
        into_chunks(tensor.float(), 1, places, chunks, chunk_size).transpose(2, 3) for tensor in (q, k, v)
    )
    total, behind, segments = (
        part.transpose(1, 2) for part in sums_in_chunks(into_chunks(decays.float(), 2, places, chunks, chunk_size))
    )
    added = (v_in * torch.exp(behind)[..., None]).mT @ k_in
    zero = added.new_zeros(added.shape[2:])
    entering, last = [[zero] * chunks for _ in range(v.shape[0])], []
    for index, (row, begin, end) in enumerate(bounds):
        state = zero if start is None else start[index]
        first = 0 if cu_seqlens is None else begin // chunk_size + index
        for chunk in range(first, first + -(-(end - begin) // chunk_size)):
            entering[row][chunk] = state
            state = torch.exp(total[row, chunk, :, -1])[:, None, None] * state + added[row, chunk]
        last.append(state)
    states = torch.stack([torch.stack(row) for row in entering]) if chunks else added
    within = (q_in @ k_in.mT) * torch.exp(segments).tril(-1)
    y = within @ v_in + torch.exp(total)[..., None] * (q_in @ states.mT)
    y = out_of_chunks(y.transpose(2, 3), 1, places, seqlen)
    direct = products.transpose(1, 2) if D is None else products.transpose(1, 2) + D.float()
    known = torch.zeros(seqlen, 1, 1, device=v.device)
    known[: len(places)] = 1
    y = y + known * direct[..., None] * v.float()
    sums = out_of_chunks(total.transpose(1, 2), 2, places, seqlen)
    return y, states, torch.stack(last), sums, total[..., -1].transpose(1, 2)
