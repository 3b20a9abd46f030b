"""Decode steps in plain torch: what tests compare with."""

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.state_update.arguments import NAME


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
    *,
    dst_state_batch_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode steps, one or several; state is updated, as by selective_state_update."""
    checks.no_complex(NAME, "A", A)
    checks.check_devices(NAME, "state", state, x=x, intermediate_states_buffer=intermediate_states_buffer)
    dtype = working_dtype(x)
    several, heads = x.dim() == state.dim(), state.dim() > 3
    full = state if heads else state.unsqueeze(1)

    def with_head(tensor, dim):
        return None if tensor is None else (tensor if heads else tensor.unsqueeze(dim)).to(dtype)

    def at(tensor, t):
        return with_head(tensor[:, t] if several and tensor is not None else tensor, 1)

    A, D, dt_bias = (with_head(tensor, 0) for tensor in (A, D, dt_bias))
    rows = torch.arange(x.shape[0]) if state_batch_indices is None else state_batch_indices
    rows = rows.to(device=state.device, dtype=torch.int64)
    active = rows >= 0
    now, outs = full[rows.clamp(min=0)].to(dtype), []
    for t in range(x.shape[1] if several else 1):
        step = (at(x, t), at(dt, t), at(B, t), at(C, t), at(z, t))
        out, now = _step(now, *step, A, D, dt_bias, dt_softplus)
        outs.append(torch.where(active[:, None, None], out, torch.zeros_like(out)))
        if intermediate_states_buffer is not None:
            stored = intermediate_states_buffer[:, t]
            stored[active] = now.reshape(stored.shape)[active].to(state.dtype)
    if dst_state_batch_indices is not None:
        rows = dst_state_batch_indices.to(device=state.device, dtype=torch.int64)
        active = active & (rows >= 0)
    full[rows[active]] = now[active].to(state.dtype)
    out = torch.stack(outs, 1) if several else outs[0]
    return out.reshape(x.shape).to(x.dtype)


def _step(state, x, dt, B, C, z, A, D, dt_bias, dt_softplus):
    """(output, new state), both with heads."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    B, C = (matrix.repeat_interleave(x.shape[1] // matrix.shape[1], dim=1) for matrix in (B, C))
    state = torch.exp(dt[..., None] * A) * state + (dt * x)[..., None] * B[:, :, None, :]
    out = (state * C[:, :, None, :]).sum(-1)
    if D is not None:
        out = out + x * D
    return out if z is None else out * F.silu(z), state
