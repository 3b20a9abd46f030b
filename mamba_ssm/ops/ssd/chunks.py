"""The pieces of Mamba-2's chunked scan in plain torch, in upstream's layouts, and the scan composed of them.

Within a chunk the scan is a masked matrix product, between chunks states are passed on (Mamba-2, arXiv 2405.21060,
section 6). These are for code that calls upstream's pieces; mamba_chunk_scan_combined runs native kernels instead.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate, K chunks, Q chunk size.
"""

import itertools

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.ssd.reference import discretize


def chunk_cumsum(
    dt: torch.Tensor,
    A: torch.Tensor,
    chunk_size: int,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[torch.Tensor, torch.Tensor]:
    """dt (B, L, H), A (H) -> dA_cumsum, dt: both (B, H, K, Q) float32, padded to whole chunks with dt = 0."""
    dt = chunked(discretize(dt, dt_bias, dt_softplus, dt_limit), chunk_size).permute(0, 3, 1, 2)
    return (dt * A.to(dt.dtype)[:, None, None]).cumsum(-1), dt


def chunk_state(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    states_in_fp32: bool = True,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each chunk adds to the state, (B, K, H, P, N).

    B (B, L, G, N), x (B, L, H, P), dt and dA_cumsum (B, H, K, Q).

    The result is float32, or has B's dtype where states_in_fp32 is false. With seq_idx (B, L) only steps of the
    sequence that the chunk ends in count.
    """
    chunk_size, nheads = dt.shape[-1], x.shape[2]
    weight = dt * torch.exp(dA_cumsum[..., -1:] - dA_cumsum)
    if seq_idx is not None:
        runs = chunk_runs(seq_idx, chunk_size)[:, None]
        weight = weight.masked_fill(runs != runs[..., -1:], 0)
    weighted = chunked(x.to(weight.dtype), chunk_size) * weight.permute(0, 2, 3, 1)[..., None]
    B_heads = _per_head(chunked(B.to(weight.dtype), chunk_size), nheads)
    states = torch.einsum("bkqhp,bkqhn->bkhpn", weighted, B_heads)
    return states if states_in_fp32 else states.to(B.dtype)


def chunk_state_forward(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    seq_idx: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    states_in_fp32: bool = True,
) -> torch.Tensor:
    """chunk_state with the order of arguments of upstream's _chunk_state_fwd; states: written in place if given."""
    result = chunk_state(B, x, dt, dA_cumsum, states_in_fp32, seq_idx)
    return result if states is None else states.copy_(result)


def chunk_state_varlen(
    B: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    cu_seqlens: torch.Tensor,
    chunk_states: torch.Tensor,
    initial_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """The state after each packed sequence, (sequences, H, P, N) in the dtype of chunk_states.

    B (L, G, N), x (L, H, P), dt and dA_cumsum (H, K, Q), chunk_states (K, H, P, N): the states that enter the chunks.
    cu_seqlens (sequences + 1) int32. initial_states (sequences, H, P, N): the state that each sequence starts from.
    """
    chunk_size, nheads = dt.shape[-1], x.shape[1]
    dt, dA_cumsum = dt.flatten(1), dA_cumsum.flatten(1)  # (H, K Q)
    B = _per_head(B, nheads).to(dt.dtype)
    bounds = cu_seqlens.tolist()
    states = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end == start:
            empty = torch.zeros_like(chunk_states[0]) if initial_states is None else initial_states[i]
            states.append(empty.to(dt.dtype))
            continue
        chunk_start = (end - 1) // chunk_size * chunk_size
        first = max(start, chunk_start)
        last_sum = dA_cumsum[:, end - 1]
        weight = dt[:, first:end] * torch.exp(last_sum[:, None] - dA_cumsum[:, first:end])
        weighted = x[first:end].to(dt.dtype) * weight.t()[..., None]
        state = torch.einsum("qhp,qhn->hpn", weighted, B[first:end])
        if start < chunk_start:
            state = state + torch.exp(last_sum)[:, None, None] * chunk_states[chunk_start // chunk_size].to(dt.dtype)
        elif initial_states is not None:
            before = dA_cumsum[:, start - 1] if start > chunk_start else torch.zeros_like(last_sum)
            state = state + torch.exp(last_sum - before)[:, None, None] * initial_states[i].to(dt.dtype)
        states.append(state)
    if not states:
        return chunk_states.new_zeros((0, *chunk_states.shape[1:]))
    return torch.stack(states).to(chunk_states.dtype)


def state_passing(
    states: torch.Tensor,
    dA_chunk_cumsum: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    chunk_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States that enter each chunk, and the one after the last, from what each chunk adds.

    states (B, K, H, S) (S: P and N flattened), dA_chunk_cumsum (B, H, K), initial_states (B, H, S); with seq_idx (B, L)
    of chunks of chunk_size steps a state goes no further than its sequence. Returns out (B, K, H, S) in out_dtype (that
    of states if None) and final_states (B, H, S) in float32 (float64 for float64 states).
    """
    dtype = working_dtype(states)
    state = torch.zeros_like(states[:, 0], dtype=dtype) if initial_states is None else initial_states.to(dtype)
    decay = chunk_decay(dA_chunk_cumsum.to(dtype), seq_idx, chunk_size)
    entering = []
    for k in range(states.shape[1]):
        entering.append(state)
        state = decay[:, :, k, None] * state + states[:, k].to(dtype)
    return torch.stack(entering, dim=1).to(out_dtype or states.dtype), state


def chunk_decay(dA_chunk_cumsum: torch.Tensor, seq_idx: torch.Tensor | None, chunk_size: int | None) -> torch.Tensor:
    """How much of the state that enters a chunk leaves it, (B, H, K)."""
    decay = torch.exp(dA_chunk_cumsum)
    if seq_idx is None:
        return decay
    runs = chunk_runs(seq_idx, chunk_size)[..., -1]  # of each chunk's last step
    before = F.pad(runs[:, :-1], (1, 0))
    return decay.masked_fill((runs != before)[:, None], 0)


def chunk_scan(
    B: torch.Tensor,
    C: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    prev_states: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs (B, L, H, P) in x's dtype, from the states that enter each chunk.

    B, C (B, L, G, N); x, z (B, L, H, P); dt, dA_cumsum (B, H, K, Q); prev_states (B, K, H, P, N); D (H) or (H, P);
    seq_idx (B, L).
    """
    products = chunk_products(C.to(dt.dtype), B.to(dt.dtype), dt.shape[-1])
    return chunk_scan_of_products(products, x, dt, dA_cumsum, C, prev_states, D, z, seq_idx)


def chunk_products(a: torch.Tensor, b: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """a b^T within each chunk, (B, K, G, Q, Q); a, b (B, L, G, N)."""
    return torch.einsum("bktgn,bksgn->bkgts", chunked(a, chunk_size), chunked(b, chunk_size))


def chunk_scan_of_products(
    products: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dA_cumsum: torch.Tensor,
    C: torch.Tensor,
    prev_states: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """chunk_scan from products = chunk_products(C, B)."""
    seqlen, nheads, chunk_size, dtype = x.shape[1], x.shape[2], dt.shape[-1], dt.dtype
    C_chunks, x_chunks = (chunked(tensor.to(dtype), chunk_size) for tensor in (C, x))
    products = products.to(dtype).transpose(1, 2).repeat_interleave(nheads // C.shape[2], dim=1)
    seen = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    in_decay = torch.exp(dA_cumsum)
    if seq_idx is not None:
        runs = chunk_runs(seq_idx, chunk_size)
        seen = (seen & (runs[..., :, None] == runs[..., None, :]))[:, None]
        before = F.pad(runs[:, :-1, -1], (1, 0))
        in_decay = in_decay.masked_fill((runs != before[..., None])[:, None], 0)
    # Masked before the exponential: above the diagonal it could overflow, and its gradient would be NaN.
    exponents = (dA_cumsum[..., :, None] - dA_cumsum[..., None, :]).masked_fill(~seen, float("-inf"))
    weights = products * torch.exp(exponents) * dt[..., None, :]
    out = torch.einsum("bhkts,bkshp->bkthp", weights, x_chunks)
    from_states = torch.einsum("bkthn,bkhpn->bkthp", _per_head(C_chunks, nheads), prev_states.to(dtype))
    out = (out + from_states * in_decay.permute(0, 2, 3, 1)[..., None]).flatten(1, 2)[:, :seqlen]
    if D is not None:
        out = out + x.to(dtype) * (D[:, None] if D.dim() == 1 else D)
    if z is not None:
        out = out * F.silu(z.to(dtype))
    return out.to(x.dtype)


def mamba_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's scan by chunks of chunk_size, in plain torch; arguments and results as mamba_chunk_scan_combined.

    The order of the first ten arguments is upstream's.
    """
    dA_cumsum, steps = chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit)
    states = chunk_state(B, x, steps, dA_cumsum, seq_idx=seq_idx)
    if initial_states is not None:
        initial_states = initial_states.flatten(-2)
    passed, final_states = state_passing(states.flatten(-2), dA_cumsum[..., -1], initial_states, seq_idx, chunk_size)
    out = chunk_scan(B, C, x, steps, dA_cumsum, passed.view_as(states), D, z, seq_idx)
    final_states = final_states.unflatten(-1, states.shape[-2:])
    return (out, final_states) if return_final_states else out


def chunked(tensor, chunk_size):
    """(B, L, ...) as (B, K, Q, ...), padded with zeros; at least one chunk."""
    seqlen = tensor.shape[1]
    padding = max(-seqlen % chunk_size, chunk_size if seqlen == 0 else 0)
    tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, padding))
    return tensor.unflatten(1, (-1, chunk_size))


def chunk_runs(seq_idx, chunk_size):
    """(B, L) -> (B, K, Q): how many times the sequence has changed up to each step."""
    changes = (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1)
    runs = F.pad(changes, (1, 0)) if seq_idx.shape[1] else seq_idx.long()
    last = runs[:, -1:] if runs.shape[1] else runs.new_zeros(runs.shape[0], 1)
    padding = max(-runs.shape[1] % chunk_size, chunk_size if runs.shape[1] == 0 else 0)
    return torch.cat([runs, last.expand(-1, padding)], dim=1).unflatten(1, (-1, chunk_size))


def _per_head(matrix, nheads):
    """B or C with its groups (the dimension before the last) repeated for the heads that share them."""
    return matrix.repeat_interleave(nheads // matrix.shape[-2], dim=-2)
