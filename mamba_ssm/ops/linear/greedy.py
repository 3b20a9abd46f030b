"""Greedy decoding's choice by one kernel, which also writes what the next step of a CUDA graph reads."""

import typing

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, pointer, run
from mamba_ssm._torch import functions_watched, reference, watched

_MOST_TOKENS = 1 << 30  # that the kernels take


class NextStep(typing.NamedTuple):
    """What a choice is written to, for each of B rows."""

    tokens: torch.Tensor  # (B) int64
    sequences: torch.Tensor  # (B, any) int64, the token at ends
    ends: torch.Tensor  # (B) int64, and then one more
    positions: torch.Tensor  # (B) int64, one more
    lengths: torch.Tensor  # (B) int32, one more
    eos: torch.Tensor | None  # (E) int64: a row that draws one of them has ended, and goes on with the first
    ended: torch.Tensor | None  # (B) bool, given where eos is


def greedy_token(logits: torch.Tensor) -> torch.Tensor:
    """logits (B, vocabulary) -> (B) int64: torch's argmax, the first of equal ones, and NaN above all numbers."""
    if not _has_kernel(logits):
        return logits.argmax(dim=-1)
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    params, functions = _params(logits, tokens)
    run(functions, "greedy_token", params)
    return tokens


def greedy_step(logits: torch.Tensor, step: NextStep) -> None:
    """The same, written to step. All of it can be captured in a CUDA graph."""
    if not _has_kernel(logits):
        return greedy_step_ref(logits, step)
    params, functions = _params(logits, step.tokens)
    params.sequences, params.ends = step.sequences.data_ptr(), step.ends.data_ptr()
    params.positions, params.lengths = step.positions.data_ptr(), step.lengths.data_ptr()
    params.sequences_row_stride = step.sequences.stride(0)
    params.ended, params.eos = pointer(step.ended), pointer(step.eos)
    params.eos_count = 0 if step.eos is None else step.eos.numel()
    return run(functions, "greedy_token", params)


def greedy_step_ref(logits: torch.Tensor, step: NextStep) -> None:
    """greedy_step in plain torch."""
    tokens = logits.argmax(dim=-1)
    if step.eos is not None and step.ended is not None:
        tokens = torch.where(step.ended, step.eos[0], tokens)
        step.ended.logical_or_((tokens[:, None] == step.eos).any(dim=1))
    step.tokens.copy_(tokens)
    step.sequences.scatter_(1, step.ends[:, None], tokens[:, None])
    for counter in (step.ends, step.positions, step.lengths):
        counter.add_(1)


def _has_kernel(logits: torch.Tensor) -> bool:
    if type(logits) is not torch.Tensor or logits.dtype not in DTYPE_CODES or not (logits.is_cpu or logits.is_cuda):
        return False
    if logits.is_neg():
        return False
    if reference.on or watched() or functions_watched():
        return False
    return logits.dim() == 2 and 1 <= logits.shape[1] <= _MOST_TOKENS and logits.stride(1) == 1


def _params(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[abi.MambaGreedyToken, typing.Any]:
    params = abi.MambaGreedyToken()
    functions = place(params, logits)
    params.rows, params.vocabulary = logits.shape
    params.dtype = DTYPE_CODES[logits.dtype]
    params.logits, params.tokens = logits.data_ptr(), tokens.data_ptr()
    params.logits_row_stride = logits.stride(0)
    return params, functions
