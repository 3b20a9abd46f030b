"""The decode step in plain torch: what tests compare with."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import working_dtype


def selective_state_update_ref(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decode step; state is updated in place, as by selective_state_update."""
    dtype = working_dtype(x)
    heads = state.dim() > 3
    full = state if heads else state.unsqueeze(1)

    def with_head(tensor, dim):
        return None if tensor is None else (tensor if heads else tensor.unsqueeze(dim)).to(dtype)

    step, dt, B, C, z = (with_head(tensor, 1) for tensor in (x, dt, B, C, z))
    A, D, dt_bias = (with_head(tensor, 0) for tensor in (A, D, dt_bias))
    batch, nheads = step.shape[:2]
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    B, C = (matrix.repeat_interleave(nheads // matrix.shape[1], dim=1) for matrix in (B, C))
    rows = torch.arange(batch) if state_batch_indices is None else state_batch_indices
    rows = rows.to(device=state.device, dtype=torch.int64)
    active = rows >= 0
    old = full[rows.clamp(min=0)].to(dtype)
    new = torch.exp(dt[..., None] * A) * old + (dt * step)[..., None] * B[:, :, None, :]
    out = (new * C[:, :, None, :]).sum(-1)
    if D is not None:
        out = out + step * D
    if z is not None:
        out = out * F.silu(z)
    out = torch.where(active[:, None, None], out, torch.zeros_like(out))
    full[rows[active]] = new[active].to(state.dtype)
    return (out if heads else out.squeeze(1)).to(x.dtype)
