"""The causal convolution in plain torch: readable, differentiable any number of times; what tests compare with."""

import itertools

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.causal_conv1d.arguments import NAME


def causal_conv1d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution, tap by tap; arguments and results as causal_conv1d_fn."""
    checks.check_devices(NAME, "x", x, final_states_out=final_states_out)
    dtype = working_dtype(x)
    width, seqlen = weight.shape[1], x.shape[2]
    beyond = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states.to(x.dtype)
    padded = torch.cat([x, beyond] if reverse else [beyond, x], dim=2)
    steps = torch.arange(seqlen, device=x.device)
    out = x.new_zeros(x.shape, dtype=dtype)
    for tap in range(width):
        first = width - 1 - tap if reverse else tap
        part = padded[:, :, first : first + seqlen].to(dtype)
        if seq_idx is not None:
            seen = steps + (first if reverse else first - (width - 1))
            there = seq_idx[:, seen.clamp(0, seqlen - 1)]  # inputs beyond the row are of the sequence at its end
            same = (there == seq_idx) & (seq_idx >= 0)
            part = torch.where(same[:, None], part, torch.zeros_like(part))
        out = out + part * weight[:, tap, None].to(dtype)
    if bias is not None:
        out = out + bias[:, None].to(dtype)
    if activation in ("silu", "swish"):
        out = F.silu(out)
    if seq_idx is not None:
        out = torch.where((seq_idx < 0)[:, None], torch.zeros_like(out), out)
    out = out.to(x.dtype)
    final_states = padded[:, :, : width - 1] if reverse else padded[:, :, seqlen:]
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return (out, final_states) if return_final_states else out


def causal_conv1d_update_ref(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Step of the causal convolution with its state; conv_state is updated in place, as by causal_conv1d_update."""
    dtype = working_dtype(x)
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


def causal_conv1d_varlen_states_ref(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """Last inputs of each packed sequence, one sequence after the other; as causal_conv1d_varlen_states."""
    bounds = cu_seqlens.tolist()
    states = x.new_zeros(len(bounds) - 1, x.shape[1], state_len)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        start = max(start, end - state_len)
        states[i, :, state_len - (end - start) :] = x[start:end].T
    return states
