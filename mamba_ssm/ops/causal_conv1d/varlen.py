"""The convolution's states of packed sequences, in plain torch."""

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import values_at_hand

_NAME = "causal_conv1d_varlen_states"


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """The last state_len inputs of each of several packed sequences, zeros before a shorter one.

    Args:
        x: (total length, D), the sequences one after the other. cu_seqlens: (sequences + 1) integers, where each
        sequence starts, and the total at the end. state_len: steps to keep, less than 2**31.

    Returns:
        (sequences, D, state_len) of x's dtype, a fit conv_state for causal_conv1d_update.

    Raises:
        TypeError: cu_seqlens is not of integers, or state_len is none. ValueError: a shape, a device or state_len is
        wrong, or cu_seqlens does not rise from 0 to at most the total length (values are looked at on the CPU alone).
    """
    checks.check_tensor(_NAME, "x", x)
    checks.check_tensor(_NAME, "cu_seqlens", cu_seqlens)
    checks.check_dims(_NAME, "x", x, 2, "(total length, D)")
    checks.check_dims(_NAME, "cu_seqlens", cu_seqlens, 1, "(sequences + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_NAME}: cu_seqlens must be int32 or int64, got {checks.short(cu_seqlens.dtype)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{_NAME}: cu_seqlens must be on {x.device} like x, got {cu_seqlens.device}")
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{_NAME}: cu_seqlens must have shape (sequences + 1,), got (0,)")
    state_len = checks.check_integer(_NAME, "state_len", state_len)
    if not 0 <= state_len < 2**31:
        raise ValueError(f"{_NAME}: state_len must be at least 0 and less than 2**31, got {state_len}")
    if values_at_hand(cu_seqlens):
        checks.check_bounds(_NAME, cu_seqlens.tolist(), x.shape[0])
    if x.shape[0] == 0:
        x = F.pad(x, (0, 0, 0, 1))  # a row for the padding to name; the result is as differentiable as any
    start, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    position = end - state_len + torch.arange(state_len, device=x.device, dtype=cu_seqlens.dtype)
    inside = position >= start
    rows = x[torch.where(inside, position, torch.zeros_like(position)).clamp(min=0)]
    return torch.where(inside[:, :, None], rows, torch.zeros_like(rows)).transpose(1, 2)
