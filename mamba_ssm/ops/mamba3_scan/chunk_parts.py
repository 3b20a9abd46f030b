"""Decays within chunks and their gradients in plain torch, under the names of upstream's kernels around Mamba-3's MIMO
scan. For code that calls these one by one: mamba3_mimo does all of it in native kernels.

Gradients are autograd's, of the functions that they belong to. Packed sequences have chunks of their own: sequence i,
which begins at step b, has those from b // Q + i on, and there are L // Q + U in all.
Letters: B batch, L length, H heads, K chunks, Q chunk size, U sequences.
"""

import itertools
import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_integer

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def dacs_segsum(da: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None) -> _Three:
    """da (B, H, L), the logarithms of the decays -> da_cs, da_cs_rev (B, H, L), segsum (B, H, K, Q, Q).

    da_cs: the sum from the chunk's first step to this one; da_cs_rev: that of the steps behind it; segsum[i, j]: of the
    steps j + 1 .. i, zero for j >= i. All are at most 0. cu_seqlens (U + 1) is read, on a GPU with a synchronisation.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils.compute_dacs_segsum_triton and _varlen.
    """
    parts = dacs_segsum_ref(da, chunk_size, cu_seqlens)
    return typing.cast(_Three, tuple(part.clamp(max=0) for part in parts))


def dacs_segsum_ref(
    da: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None = None, num_sequences: int | None = None
) -> _Three:
    """dacs_segsum of decays of any sign; num_sequences has no effect."""
    checks.check_dims("compute_dacs_segsum", "da", da, 3, "(B, H, L)")
    places, chunks = chunk_places(da, chunk_size, cu_seqlens)
    steps = da.shape[-1]
    padded = da.new_zeros(*da.shape[:2], chunks * chunk_size).index_copy(-1, places, da[..., : len(places)])
    padded = padded.unflatten(-1, (chunks, chunk_size))
    behind = F.pad(padded[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
    segments = padded[..., None].expand(*padded.shape, chunk_size).tril(-1).cumsum(-2).tril(-1)
    by_step = (
        F.pad(part.flatten(-2).index_select(-1, places), (0, steps - len(places)))
        for part in (padded.cumsum(-1), behind)
    )
    return typing.cast(_Three, (*by_step, segments))


def chunk_places(da: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Where each step lies in its chunks laid end to end, and how many chunks there are. Steps behind the last sequence
    have no place.
    """
    check_integer("compute_dacs_segsum", "chunk_size", chunk_size)
    seqlen = da.shape[-1]
    if cu_seqlens is None:
        return torch.arange(seqlen, device=da.device), -(-seqlen // chunk_size)
    bounds = cu_seqlens.tolist()
    checks.check_bounds("compute_dacs_segsum", bounds, seqlen)
    places = [
        torch.arange(end - begin) + (begin // chunk_size + row) * chunk_size
        for row, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
    none = torch.zeros(0, dtype=torch.int64)
    return torch.cat([none, *places]).to(da.device), seqlen // chunk_size + len(bounds) - 1


def dacs_segsum_backward(
    dSSdA: torch.Tensor,
    SSdA: torch.Tensor,
    ddA_cs: torch.Tensor,
    ddA_cs_rev: torch.Tensor,
    dA_cs: torch.Tensor,
    dA_cs_rev: torch.Tensor,
    chunk_size: int,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient (B, H, L) float32 of da, from those of exp(dA_cs), exp(dA_cs_rev) and exp(SSdA) of what dacs_segsum
    returned. dSSdA (B, H, K, Q, Q) is transposed, [j, i].

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils.bwd_dadt_fused_triton and _varlen.
    """
    da = torch.zeros_like(ddA_cs, dtype=torch.float32).requires_grad_()
    given = (dA_cs, ddA_cs), (dA_cs_rev, ddA_cs_rev), (SSdA, dSSdA.mT)
    with torch.enable_grad():
        sums = dacs_segsum_ref(da, chunk_size, cu_seqlens)
    for found, (logarithm, gradient) in zip(sums, given, strict=True):
        for name, tensor in (("a sum", logarithm), ("its gradient", gradient)):
            if tensor.shape != found.shape:
                raise ValueError(
                    f"bwd_dadt_fused: {name} must have shape {tuple(found.shape)}, got {tuple(tensor.shape)}"
                )
    cotangents = [torch.exp(logarithm.float()) * gradient.float() for logarithm, gradient in given]
    return torch.autograd.grad(sums, da, cotangents)[0]


def trap_dt_backward(
    trap: torch.Tensor,
    dt: torch.Tensor,
    dfactor: torch.Tensor,
    dgamma_diag: torch.Tensor,
    chunk_size: int,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ddt, dtrap), all (B, H, L), from the gradients of factor and gamma: gamma = sigmoid(trap) dt, and factor is it
    plus (1 - sigmoid(trap)) dt of the sequence's next step. chunk_size has no effect; cu_seqlens is read.

    Same as upstream's mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils.bwd_dtrap_ddt_triton and _varlen.
    """
    checks.check_dims("bwd_dtrap_ddt", "dt", dt, 3, "(B, H, L)")
    for name, tensor in (("trap", trap), ("dfactor", dfactor), ("dgamma_diag", dgamma_diag)):
        checks.check_float("bwd_dtrap_ddt", name, tensor, dt.shape, dt, "dt", "(B, H, L)")
    weight, step = (tensor.detach().float().requires_grad_() for tensor in (trap, dt))
    with torch.enable_grad():
        gamma = torch.sigmoid(weight) * step
        following = torch.sigmoid(-weight) * step
        if cu_seqlens is not None:
            bounds = cu_seqlens.tolist()
            checks.check_bounds("bwd_dtrap_ddt", bounds, dt.shape[-1])
            first = [begin for begin in bounds if begin < dt.shape[-1]]
            starts = torch.zeros(dt.shape[-1], dtype=torch.bool)
            starts[first] = True
            following = following.masked_fill(starts.to(dt.device), 0)
        factor = gamma + F.pad(following[..., 1:], (0, 1))[..., : dt.shape[-1]]
    dtrap, ddt = torch.autograd.grad((factor, gamma), (weight, step), (dfactor.float(), dgamma_diag.float()))
    return ddt.to(dt.dtype), dtrap.to(trap.dtype)
