"""The selective scan in plain torch: readable, differentiable any number of times, slow; what tests compare with."""

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops._shared.reference import convert, working_dtype
from mamba_ssm.ops.selective_scan.arguments import NAME


def selective_scan_ref(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Selective scan, one step after the other; arguments and results as selective_scan_fn.

    A may be complex, as in upstream's slow path: then B and C are complex constants, or variable with twice the length,
    real and imaginary parts in turn; the state is complex, and the output is twice the real part of C h.
    """
    out_dtype, dtype = u.dtype, working_dtype(u)
    is_complex = A.dtype.is_complex  # not A.is_complex(), where torch.export of 2.2 stops
    wide = dtype.to_complex() if is_complex else dtype
    real = {"delta": delta, "D": D, "z": z, "delta_bias": delta_bias}
    if not is_complex:
        real = {**real, "B": B, "C": C, "initial_state": initial_state}  # no |=: torch.export of 2.4 stops there
    for name, tensor in real.items():
        if tensor is not None:
            checks.no_complex(NAME, name, tensor)
    if is_complex:
        B, C = (_paired(name, matrix, u.shape[-1], dtype) for name, matrix in (("B", B), ("C", C)))
    u, delta, A, B, C = u.to(dtype), delta.to(dtype), A.to(wide), B.to(wide), C.to(wide)
    D, z, delta_bias, state = (*(convert(tensor, dtype) for tensor in (D, z, delta_bias)), convert(initial_state, wide))
    batch, dim, seqlen = u.shape
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    if state is None:
        state = A.new_zeros(batch, dim, A.shape[1])
    B, C = (_per_channel(matrix, batch, dim, seqlen) for matrix in (B, C))
    y = []
    # unbind: the gradient of indexing would be as long as the sequence at every step
    steps = list(enumerate(zip(*(tensor.unbind(-1) for tensor in (delta, u, B, C)), strict=True)))
    before = None
    for t, (dt, u_t, B_t, C_t) in reversed(steps) if reverse else steps:
        if seq_idx is not None and before is not None:
            same = seq_idx[:, t] == seq_idx[:, before]
            state = torch.where(same[:, None, None], state, torch.zeros_like(state))
        state = torch.exp(dt[..., None] * A) * state + (dt * u_t)[..., None] * B_t
        y_t = (state * C_t).sum(-1)
        y.append(2 * y_t.real if is_complex else y_t)
        before = t
    if reverse:
        y.reverse()
    out = torch.stack(y, dim=2) if y else torch.zeros_like(u)
    if D is not None:
        out = out + u * D[:, None]
    if z is not None:
        out = out * F.silu(z)
    out = out.to(out_dtype)
    return (out, state) if return_last_state else out


def _paired(name, matrix, seqlen, dtype):
    """A variable B or C (..., 2L) of pairs as complex numbers (..., L)."""
    if matrix.dim() == 2 or matrix.dtype.is_complex:
        return matrix
    if matrix.shape[-1] != 2 * seqlen:
        raise ValueError(
            f"{NAME}: {name} has real and imaginary parts in turn where A is complex, so its last dimension must be "
            f"{2 * seqlen}, got {matrix.shape[-1]}"
        )
    return torch.view_as_complex(matrix.to(dtype).unflatten(-1, (-1, 2)).contiguous())


def _per_channel(matrix, batch, dim, seqlen):
    """B or C in any of its forms as (B, D, N, L)."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None].expand(batch, -1, -1, seqlen)
    if matrix.dim() == 3:
        matrix = matrix[:, None]
    return matrix.repeat_interleave(dim // matrix.shape[1], dim=1)
