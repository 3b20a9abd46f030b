"""Mamba-2's scan (state space duality): the public function.

h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  out_t = (h_t C_t + D x_t) silu(z_t);
dt_t = clamp(softplus?(dt_t + dt_bias), dt_limit) (Mamba-2, arXiv 2405.21060, section 6).
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import itertools

import torch

from mamba_ssm.ops.ssd_chunks import mamba_chunk_scan


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
    state_dtype=None,
):
    """Mamba-2's scan along the length."""
    if cu_seqlens is not None and seq_idx is None:
        positions = torch.arange(x.shape[1], device=x.device)
        seq_idx = torch.bucketize(positions, cu_seqlens[1:], right=True, out_int32=True)[None]
    options = dt_bias, dt_softplus, initial_states, seq_idx, dt_limit, True
    out, final_states = mamba_chunk_scan(x, dt, A, B, C, min(chunk_size, 64), D, z, *options)
    results = [out]
    if return_final_states:
        results.append(final_states if state_dtype is None else final_states.to(state_dtype))
    if return_varlen_states:
        bounds = cu_seqlens.tolist()
        states = []
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            part = slice(start, end)
            initial = initial_states if i == 0 else None
            options = dt_bias, dt_softplus, initial, None, dt_limit, True
            states.append(
                mamba_chunk_scan(x[:, part], dt[:, part], A, B[:, part], C[:, part], 64, D, None, *options)[1]
            )
        states = torch.cat(states).detach()
        results.append(states if state_dtype is None else states.to(state_dtype))
    return results[0] if len(results) == 1 else tuple(results)
