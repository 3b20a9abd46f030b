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
    total, behind, segments = sums_in_chunks(into_chunks(da, 2, places, chunks, chunk_size))
    seqlen = da.shape[-1]
    return out_of_chunks(total, 2, places, seqlen), out_of_chunks(behind, 2, places, seqlen), segments


def sums_in_chunks(da: torch.Tensor) -> _Three:
    """dacs_segsum of da in chunks, (..., Q), each in chunks, too."""
    behind = F.pad(da[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
    segments = da[..., None].expand(*da.shape, da.shape[-1]).tril(-1).cumsum(-2).tril(-1)
    return da.cumsum(-1), behind, segments


def into_chunks(tensor: torch.Tensor, dim: int, places: torch.Tensor, chunks: int, chunk_size: int) -> torch.Tensor:
    """The dimension of the steps as two, (K, Q); zero where a chunk has no step."""
    shape = (*tensor.shape[:dim], chunks * chunk_size, *tensor.shape[dim + 1 :])
    whole = tensor.new_zeros(shape).index_copy(dim, places, tensor.narrow(dim, 0, len(places)))
    return whole.unflatten(dim, (chunks, chunk_size))


def out_of_chunks(tensor: torch.Tensor, dim: int, places: torch.Tensor, seqlen: int) -> torch.Tensor:
    """The reverse of into_chunks; zero behind the last sequence."""
    steps = tensor.flatten(dim, dim + 1).index_select(dim, places)
    rest = steps.new_zeros(*steps.shape[:dim], seqlen - len(places), *steps.shape[dim + 1 :])
    return torch.cat([steps, rest], dim)


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
        gamma, factor = factors(weight, step, cu_seqlens)
    dtrap, ddt = torch.autograd.grad((factor, gamma), (weight, step), (dfactor.float(), dgamma_diag.float()))
    return ddt.to(dt.dtype), dtrap.to(trap.dtype)


def factors(
    trap: torch.Tensor, dt: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gamma, factor) of trap before the sigmoid and dt, all (B, H, L): see trap_dt_backward."""
    gamma, following = torch.sigmoid(trap) * dt, torch.sigmoid(-trap) * dt
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        checks.check_bounds("Mamba-3", bounds, dt.shape[-1])
        starts = torch.zeros(dt.shape[-1], dtype=torch.bool)
        starts[[begin for begin in bounds if begin < dt.shape[-1]]] = True
        following = following.masked_fill(starts.to(dt.device), 0)
    return gamma, gamma + F.pad(following[..., 1:], (0, 1))[..., : dt.shape[-1]]


def steps_of_sums(sums: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """da (B, H, L) of its sums from the first step of each chunk on."""
    checks.check_dims("Mamba-3", "the sums of da", sums, 3, "(B, H, L)")
    places, _ = chunk_places(sums, chunk_size, cu_seqlens)
    before = torch.cat([torch.zeros_like(sums[..., :1]), sums[..., :-1]], dim=-1)
    first = torch.zeros(sums.shape[-1], dtype=torch.bool, device=sums.device)
    first[: len(places)] = places % chunk_size == 0
    return sums - before.masked_fill(first, 0)
