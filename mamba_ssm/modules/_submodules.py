"""How blocks call a convolution that may have been replaced or have hooks."""

import math
import typing

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._torch import is_compiling, is_plain, reference
from mamba_ssm.distributed.across_ranks import causal_conv1d_across_ranks
from mamba_ssm.modules.padding import Padding
from mamba_ssm.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_step,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)


def conv_widths() -> tuple[int, float]:
    """The least and the most d_conv: what the kernels take, or under plain_torch any."""
    return (1, math.inf) if reference.on else (2, 4)


def convolve(
    conv1d: nn.Module,
    x: torch.Tensor,
    activation: str | None,
    seq_idx: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
    continues: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    reverse: bool = False,
    padding: Padding | None = None,
) -> torch.Tensor:
    """x (B, D, L) through the causal depthwise convolution that conv1d holds, and the activation (None: none).

    conv_state: (B, D, d_conv), takes the last inputs, or None. With continues x goes on from those that it holds. With
        cu_seqlens, (sequences + 1), its rows are for the sequences that are packed in x.
    reverse: backwards in time; without conv_state.
    padding: x counts as zero there, and the result is zero. With conv_state at the start of rows alone.
    """
    if padding is not None:
        if not is_plain(conv1d, nn.Conv1d):  # what took its place knows no padding
            x = padding.zero(x.transpose(1, 2)).transpose(1, 2)
            dense = convolve(conv1d, x, activation, None, conv_state, continues, reverse=reverse)
            return padding.zero(dense.transpose(1, 2)).transpose(1, 2)
        seq_idx = padding.seq_idx
    before = None if conv_state is None else _keep_last(conv_state, x, continues, cu_seqlens, padding)
    if is_plain(conv1d, nn.Conv1d):
        weight, bias = conv1d.weight.squeeze(1), conv1d.bias
        out: typing.Any = causal_conv1d_fn(
            x, weight, bias, seq_idx=seq_idx, initial_states=before, activation=activation, reverse=reverse
        )
        return out
    if seq_idx is not None:
        raise ValueError(
            "packed sequences (seq_idx, cu_seqlens) need conv1d as it was made, got one with hooks or replaced by "
            f"{type(conv1d).__name__}: remove them, or give one sequence a row"
        )
    if reverse:  # the module knows one direction
        return convolve(conv1d, x.flip(-1), activation).flip(-1)
    start, seqlen = 0, x.shape[-1]
    if before is not None:
        start, x = before.shape[-1], torch.cat([before, x], dim=-1)
    return _activate(conv1d(x)[..., start : start + seqlen], activation)


def convolve_across_ranks(
    conv1d: nn.Module, x: torch.Tensor, activation: str | None, group: "dist.ProcessGroup"
) -> torch.Tensor:
    """convolve, of this rank's part of the sequence."""
    conv1d = plain_convolution(conv1d)
    return causal_conv1d_across_ranks(x, conv1d.weight.squeeze(1), conv1d.bias, activation, group)


def plain_convolution(conv1d: nn.Module) -> nn.Conv1d:
    """conv1d, which must be no more than its parameters."""
    if not is_plain(conv1d, nn.Conv1d):
        raise ValueError(
            "context_parallel needs conv1d as it was made, got one with hooks or replaced by "
            f"{type(conv1d).__name__}: remove them"
        )
    return conv1d


@torch.no_grad()
def _keep_last(
    conv_state: torch.Tensor,
    x: torch.Tensor,
    continues: bool,
    cu_seqlens: torch.Tensor | None,
    padding: Padding | None = None,
) -> torch.Tensor | None:
    """Writes the last inputs into conv_state; returns those before x, (B, D, d_conv - 1), or None."""
    if cu_seqlens is not None:
        conv_state.copy_(causal_conv1d_varlen_states(x[0].t(), cu_seqlens, conv_state.shape[-1]))
        return None
    width = conv_state.shape[-1]
    before = conv_state[..., 1:].to(x.dtype, copy=True) if continues else None
    if before is not None and is_compiling():
        # An exported program is for all lengths: no size may depend on whether x is shorter than width.
        conv_state.copy_(torch.cat([before, x], dim=-1)[..., -width:])
        return before
    inputs = x if before is None else torch.cat([before, x[..., -width:]], dim=-1)
    if padding is not None:
        inputs = x[..., -width:].masked_fill(~padding.real[:, None, -width:], 0)
    conv_state.copy_(F.pad(inputs, (width - inputs.shape[-1], 0)))  # zeros before a shorter sequence
    return before


def convolve_step(conv1d: nn.Module, x: torch.Tensor, conv_state: torch.Tensor, activation: str | None) -> torch.Tensor:
    """One step: x (B, D), conv_state (B, D, d_conv) updated in place -> (B, D)."""
    if is_plain(conv1d, nn.Conv1d):
        return causal_conv1d_update(x, conv_state, conv1d.weight.squeeze(1), conv1d.bias, activation)
    conv_state.copy_(torch.cat([conv_state[..., 1:], x[..., None]], dim=-1))
    return _activate(conv1d(conv_state.to(x.dtype))[..., conv_state.shape[-1] - 1], activation)


def convolve_differentiable_step(
    conv1d: nn.Module, x: torch.Tensor, conv_state: torch.Tensor, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """convolve_step that returns (out, new state) and leaves conv_state as it is."""
    if is_plain(conv1d, nn.Conv1d):
        return causal_conv1d_step(x, conv_state, conv1d.weight.squeeze(1), conv1d.bias, activation)
    conv_state = torch.cat([conv_state[..., 1:], x[..., None].to(conv_state.dtype)], dim=-1)
    return _activate(conv1d(conv_state.to(x.dtype))[..., conv_state.shape[-1] - 1], activation), conv_state


def _activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return x if activation is None else F.silu(x)


def project_channels(projection: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """projection of x (B, D, L) as (B, out, L), in memory too: each channel's time line stays contiguous."""
    if is_plain(projection, nn.Linear) and projection.bias is None:
        return times_channels(projection.weight, x)
    return projection(x.transpose(1, 2)).transpose(1, 2)


def times_channels(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight (out, D) times x (B, D, L). Not by matmul, which would transpose x in memory."""
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)
