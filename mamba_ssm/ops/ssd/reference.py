"""Plain torch references of Mamba-2's scan, one step after the other: the truth that the tests compare with.

A head of Mamba-2 is headdim channels of Mamba-1 that share dt and A, so both references run Mamba-1's. They compute in
float32, or in float64 where the inputs are float64, and are differentiable any number of times.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import itertools
import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.activations import clamp
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref
from mamba_ssm.ops.ssd.arguments import NAME


def ssd_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Mamba-2's scan as Mamba-1's, step by step; the name and arguments are upstream's.

    x, z (B, L, H, P); dt (B, L, H) or (B, L, H, P); A (H) or (H, P, N); B, C (B, L, G, N); D (H) or (H, P);
    dt_bias (H) or (H, P). Returns out (B, L, H, P) in x's dtype.
    """
    out = ssd_chunk_scan_combined_ref(x, dt, A, B, C, None, D, z, dt_bias, dt_softplus, dt_limit=dt_limit)
    return typing.cast(torch.Tensor, out)  # no states were asked for


def ssd_chunk_scan_combined_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int | None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's scan, step by step; arguments and results as mamba_chunk_scan_combined.

    The order of the first ten arguments is upstream's; chunk_size has no effect on the result.
    """
    checks.no_complex(NAME, "A", A)
    batch, seqlen, nheads, headdim = x.shape
    dstate, dim = B.shape[-1], nheads * headdim
    dtype = working_dtype(x)

    def channels(tensor):
        """(B, L, H, P) as (B, H P, L)."""
        return None if tensor is None else tensor.reshape(batch, seqlen, dim).transpose(1, 2)

    dt = discretize(dt.to(dtype), dt_bias, dt_softplus, dt_limit)
    if dt.dim() == 3:
        dt = dt[..., None].expand(x.shape)
    if A.dim() == 1:
        A = A[:, None, None].expand(nheads, headdim, dstate)
    if D is not None:
        D = (D if D.dim() == 2 else D[:, None].expand(nheads, headdim)).reshape(dim)
    if initial_states is not None:
        initial_states = initial_states.reshape(batch, dim, dstate)
    B, C = (matrix.permute(0, 2, 3, 1) for matrix in (B, C))
    out, state = selective_scan_ref(
        channels(x).to(dtype), channels(dt), A.reshape(dim, dstate), B, C, D, channels(z),
        return_last_state=True, initial_state=initial_states, seq_idx=seq_idx, reverse=reverse,
    )  # fmt: skip
    out = out.transpose(1, 2).reshape(x.shape).to(x.dtype)
    return (out, state.reshape(batch, nheads, headdim, dstate)) if return_final_states else out


def ssd_by_reference(
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_states, seq_idx, dt_limit, cu_seqlens, reverse
):
    """(out, final_states), and with cu_seqlens the states after each sequence, which carry no gradient."""
    options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": True}
    given = {"D": D, "z": z, "initial_states": initial_states, "seq_idx": seq_idx}
    results = ssd_chunk_scan_combined_ref(x, dt, A, B, C, None, **given, **options, reverse=reverse)
    if cu_seqlens is None:
        return results
    states = []
    with torch.no_grad():
        for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            parts = (tensor[:, start:end] for tensor in (x, dt, B, C))
            initial = initial_states if i == 0 else None
            x_part, dt_part, B_part, C_part = parts
            sequence = x_part, dt_part, A, B_part, C_part, None
            states.append(ssd_chunk_scan_combined_ref(*sequence, initial_states=initial, **options)[1])
    return *results, torch.cat(states)


def discretize(dt, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf"))):
    """clamp(softplus?(dt + dt_bias), dt_limit) in float32 or float64: the step sizes that the scan uses."""
    dt = dt.to(working_dtype(dt))
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return clamp(dt, *dt_limit)
