"""Plain torch references: readable, differentiable any number of times, slow. The truth that the tests compare with.

They compute in float32, or in float64 where the inputs are float64, and take every dtype mix that the operators take.
"""

import itertools

import torch
import torch.nn.functional as F


def _working_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _convert(tensor, dtype):
    return None if tensor is None else tensor.to(dtype)


def selective_scan_ref(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    initial_state=None,
    seq_idx=None,
):
    """Selective scan, one step after the other; arguments and results as selective_scan_fn."""
    out_dtype, dtype = u.dtype, _working_dtype(u)
    u, delta, A, B, C = (tensor.to(dtype) for tensor in (u, delta, A, B, C))
    D, z, delta_bias, state = (_convert(tensor, dtype) for tensor in (D, z, delta_bias, initial_state))
    batch, dim, seqlen = u.shape
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    if state is None:
        state = u.new_zeros(batch, dim, A.shape[1])
    B, C = (_per_channel(matrix, batch, dim, seqlen) for matrix in (B, C))
    steps = []
    # unbind: the gradient of indexing would be as long as the sequence at every step
    for t, (dt, u_t, B_t, C_t) in enumerate(zip(*(tensor.unbind(-1) for tensor in (delta, u, B, C)), strict=True)):
        if seq_idx is not None and t > 0:
            same = seq_idx[:, t] == seq_idx[:, t - 1]
            state = torch.where(same[:, None, None], state, torch.zeros_like(state))
        state = torch.exp(dt[..., None] * A) * state + (dt * u_t)[..., None] * B_t
        steps.append((state * C_t).sum(-1))
    out = torch.stack(steps, dim=2) if steps else torch.zeros_like(u)
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


def rms_norm_ref(x, weight, eps):
    """x / rms(x) * weight over the last dimension, in x's dtype."""
    dtype = _working_dtype(x)
    wide = x.to(dtype)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(dtype)).to(x.dtype)


def mamba_inner_ref(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B=None,
    C=None,
    D=None,
    delta_bias=None,
    B_proj_bias=None,
    C_proj_bias=None,
    delta_softplus=True,
    checkpoint_lvl=1,
    b_rms_weight=None,
    c_rms_weight=None,
    dt_rms_weight=None,
    b_c_dt_rms_eps=1e-6,
):
    """Conv, projections, scan, gate and output projection of a Mamba block; arguments as mamba_inner_fn.

    checkpoint_lvl has no effect here: everything is kept.
    """
    delta_rank, dstate = delta_proj_weight.shape[1], A.shape[-1]
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_ref(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    x_dbl = F.linear(x.transpose(1, 2), x_proj_weight)
    delta = F.linear(x_dbl[..., :delta_rank], delta_proj_weight)
    if dt_rms_weight is not None:
        delta = rms_norm_ref(delta, dt_rms_weight, b_c_dt_rms_eps)

    def variable(matrix, bias, rms_weight):
        if bias is not None:
            matrix = matrix + bias.to(matrix.dtype)
        if rms_weight is not None:
            matrix = rms_norm_ref(matrix, rms_weight, b_c_dt_rms_eps)
        return matrix.transpose(1, 2)

    if B is None:
        B = variable(x_dbl[..., delta_rank : delta_rank + dstate], B_proj_bias, b_rms_weight)
    if C is None:
        C = variable(x_dbl[..., x_dbl.shape[-1] - dstate :], C_proj_bias, c_rms_weight)
    y = selective_scan_ref(x, delta.transpose(1, 2), A, B, C, D, z, delta_bias, delta_softplus)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def causal_conv1d_ref(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """Causal depthwise convolution, tap by tap; arguments and results as causal_conv1d_fn."""
    dtype = _working_dtype(x)
    width, seqlen = weight.shape[1], x.shape[2]
    before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states.to(x.dtype)
    padded = torch.cat([before, x], dim=2)
    out = x.new_zeros(x.shape, dtype=dtype)
    for tap in range(width):
        part = padded[:, :, tap : tap + seqlen].to(dtype)
        if seq_idx is not None:
            there = F.pad(seq_idx, (width - 1, 0), value=-(2**31))[:, tap : tap + seqlen]
            part = torch.where((there == seq_idx)[:, None], part, torch.zeros_like(part))
        out = out + part * weight[:, tap, None].to(dtype)
    if bias is not None:
        out = out + bias[:, None].to(dtype)
    if activation in ("silu", "swish"):
        out = F.silu(out)
    out = out.to(x.dtype)
    final_states = padded[:, :, seqlen:]
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return (out, final_states) if return_final_states else out


def causal_conv1d_update_ref(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    """Step of the causal convolution with its state; conv_state is updated in place, as by causal_conv1d_update."""
    dtype = _working_dtype(x)
    width, state_len = weight.shape[1], conv_state.shape[2]
    steps = x if x.dim() == 3 else x[..., None]
    out = torch.zeros_like(steps)
    for b in range(steps.shape[0]):
        row = b if conv_state_indices is None else int(conv_state_indices[b])
        if row < 0:
            continue
        state = conv_state[row]
        # newest last, whatever the state's own order is
        start = 0 if cache_seqlens is None else int(cache_seqlens[b]) % state_len
        history = torch.roll(state, -start, dims=1).to(dtype)
        line = torch.cat([history, steps[b].to(dtype)], dim=1)
        if steps.shape[2] == 0:
            continue
        windows = line[:, state_len - (width - 1) :].unfold(1, width, 1)
        result = (windows * weight[:, None].to(dtype)).sum(-1)
        if bias is not None:
            result = result + bias[:, None].to(dtype)
        out[b] = F.silu(result) if activation in ("silu", "swish") else result
        newest = line[:, line.shape[1] - state_len :]
        if cache_seqlens is not None:
            newest = torch.roll(newest, (start + steps.shape[2]) % state_len, dims=1)
        state.copy_(newest)
    return out if x.dim() == 3 else out[..., 0]


def causal_conv1d_varlen_states_ref(x, cu_seqlens, state_len):
    """Last inputs of each packed sequence, one sequence after the other; as causal_conv1d_varlen_states."""
    bounds = cu_seqlens.tolist()
    states = x.new_zeros(len(bounds) - 1, x.shape[1], state_len)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        start = max(start, end - state_len)
        states[i, :, state_len - (end - start) :] = x[start:end].T
    return states


def selective_state_update_ref(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    """One decode step; state is updated in place, as by selective_state_update."""
    dtype = _working_dtype(x)
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
