"""The selective scan in plain torch: readable, differentiable any number of times, slow; what tests compare with."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import convert, working_dtype


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
    """Selective scan, one step after the other; arguments and results as selective_scan_fn."""
    out_dtype, dtype = u.dtype, working_dtype(u)
    u, delta, A, B, C = (tensor.to(dtype) for tensor in (u, delta, A, B, C))
    D, z, delta_bias, state = (convert(tensor, dtype) for tensor in (D, z, delta_bias, initial_state))
    batch, dim, seqlen = u.shape
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    if state is None:
        state = u.new_zeros(batch, dim, A.shape[1])
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
        y.append((state * C_t).sum(-1))
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


def _per_channel(matrix, batch, dim, seqlen):
    """B or C in any of its forms as (B, D, N, L)."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None].expand(batch, -1, -1, seqlen)
    if matrix.dim() == 3:
        matrix = matrix[:, None]
    return matrix.repeat_interleave(dim // matrix.shape[1], dim=1)
