"""Mamba-2's scan in chunks, by matrix products in plain torch, and what its operators have by it: double backward,
forward mode and the derivatives of torch.func.

Within a chunk the scan is a masked matrix product; one state a chunk carries it on to the next (Mamba-2, arXiv
2405.21060, section 6). All decays are exp of sums over one segment: differences of a running sum would lose digits.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate, K chunks, T steps of a chunk.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._torch import derivatives
from mamba_ssm.ops._shared.reference import convert, working_dtype
from mamba_ssm.ops.ssd.arguments import Inputs, with_gate
from mamba_ssm.ops.ssd.backward import ssd_backward_op
from mamba_ssm.ops.ssd.forward import ssd_op
from mamba_ssm.ops.ssd.reference import discretize

_TENSORS = len(Inputs._fields)
_CHUNK = 64
_RESTART = -1e5  # exp of it is zero, in float64 too


def segsum(x: torch.Tensor) -> torch.Tensor:
    """x (..., T) -> (..., T, T): sums of x[j+1..i] at [i, j], 0 on the diagonal, -inf above it.

    Adds each segment up separately: differences of one running sum would lose digits.
    """
    size = x.shape[-1]
    steps = x[..., None].expand(*x.shape, size).tril(-1)
    above = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    return steps.cumsum(-2).masked_fill(above, -torch.inf)


def scan_in_chunks(
    X: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk: int,
    initial_states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(A_t) h_{t-1} + X_t B_t^T;  Y_t = h_t C_t: Y (B, L, H, P) and the last states (B, H, P, N).

    Of one dtype: X (B, L, H, P) and A (B, L, H), both times dt; B, C (B, L, G, N); initial_states (B, H, P, N) or None.
    """
    batch, seqlen, nheads, headdim = X.shape
    B, C = (matrix.repeat_interleave(nheads // matrix.shape[2], dim=2) for matrix in (B, C))
    fill = -seqlen % chunk  # steps with X = 0 and A = 0 change nothing

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, fill)).unflatten(1, (-1, chunk))

    X, A, B, C = (chunks(x) for x in (X, A, B, C))
    A = A.permute(0, 3, 1, 2)  # (B, H, K, T)
    summed = A.cumsum(-1)

    within = torch.exp(segsum(A))
    Y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, within, X)

    added = torch.einsum("bclhn,bhcl,bclhp->bchpn", B, within[..., -1, :], X)  # to the state, by each chunk
    if initial_states is None:
        initial_states = added.new_zeros(batch, nheads, headdim, B.shape[-1])
    added = torch.cat([initial_states[:, None], added], dim=1)
    between = torch.exp(segsum(F.pad(summed[..., -1], (1, 0))))  # from the start of a chunk to that of a later one
    states = torch.einsum("bhzc,bchpn->bzhpn", between, added)

    Y = Y + torch.einsum("bclhn,bchpn,bhcl->bclhp", C, states[:, :-1], torch.exp(summed))
    return Y.flatten(1, 2)[:, :seqlen], states[:, -1]


def _formula(*arguments):
    """The operator's results."""
    inputs, (softplus, dt_min, dt_max, want_states, reverse) = Inputs(*arguments[:_TENSORS]), arguments[_TENSORS:]
    dtype, seq_idx = working_dtype(inputs.x), inputs.seq_idx
    x, dt, A, B, C, D, z, dt_bias, initial_states = (convert(tensor, dtype) for tensor in inputs[:-1])
    dt = discretize(dt, dt_bias, softplus, (dt_min, dt_max))
    decay = dt * A
    if seq_idx is not None:
        before, after = (seq_idx[:, 1:], seq_idx[:, :-1]) if reverse else (seq_idx[:, :-1], seq_idx[:, 1:])
        restarts = F.pad((before != after).to(dtype), (0, 1) if reverse else (1, 0))
        decay = decay + _RESTART * restarts[..., None]
    given = x * dt[..., None], decay, B, C
    if reverse:
        given = tuple(tensor.flip(1) for tensor in given)
    out, final_states = scan_in_chunks(*given, _CHUNK, initial_states)
    if reverse:
        out = out.flip(1)
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        out = out * F.silu(z)
    return out.to(inputs.x.dtype), final_states if want_states else None


def _gradients(dout, dfinal_states, *arguments):
    """The backward operator's results."""
    *given, softplus, dt_min, dt_max, need_dinitial_states, reverse = arguments
    options = softplus, dt_min, dt_max, dfinal_states is not None, reverse

    def run(*given):
        return _formula(*with_gate(given, None), *options)

    *grads, dinitial_states, _ = derivatives.vjp(run, given, (dout, dfinal_states))
    return *grads, dinitial_states if need_dinitial_states else None


derivatives.extend(ssd_op, _formula)
derivatives.extend_backward(ssd_backward_op, _gradients)
