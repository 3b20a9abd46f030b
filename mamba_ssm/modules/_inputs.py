"""Checks of what a block is called with, shared by the blocks."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import values_at_hand
from mamba_ssm.modules.inference import InferenceCache


def check_input(name: str, x: torch.Tensor, d_model: int, dims: int = 3, seq_idx: torch.Tensor | None = None) -> None:
    """x is (B, L, d_model), or with dims=2 (B * L, d_model). seq_idx is a tensor or None: operators check the rest."""
    checks.check_tensor(name, "the input", x)
    if seq_idx is not None:
        checks.check_tensor(name, "seq_idx", seq_idx)
    if x.dim() != dims or x.shape[-1] != d_model:
        letters = "(B, L, d_model)" if dims == 3 else "(B * L, d_model) where seqlen is given"
        raise ValueError(f"{name}: the input must be {letters} with d_model = {d_model}, got {tuple(x.shape)}")


def is_continued(name: str, inference_params: InferenceCache | None) -> bool:
    """Whether a call goes on from the states that earlier ones left."""
    if inference_params is None:
        return False
    offset = inference_params.seqlen_offset
    if offset < 0:
        raise ValueError(
            f"{name}: seqlen_offset must be the number of tokens that went in before, 0 first, got {offset}"
        )
    return offset > 0


def refuse_decoding(name: str, option: str = "") -> typing.NoReturn:
    """What decodes goes from one step to the next; in these layers each depends on those that follow."""
    raise ValueError(
        f"{name}: {option or 'the layer'} is not causal, so it has no states and no step to decode with: call it on "
        "whole sequences, or take a causal layer to generate"
    )


def check_cu_seqlens(
    name: str, cu_seqlens: torch.Tensor, x: torch.Tensor, synchronize: bool = False
) -> list[int] | None:
    """cu_seqlens bounds sequences packed in the one row of x (1, L, ...). Returns its values, or None.

    They are looked at on the CPU alone, unless synchronize is set: on a GPU that would be a synchronisation.
    """
    checks.check_tensor(name, "cu_seqlens", cu_seqlens)
    if x.shape[0] != 1:
        raise ValueError(f"{name}: cu_seqlens takes sequences packed in a batch of 1, got a batch of {x.shape[0]}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: cu_seqlens must be (sequences + 1,) of int32, got {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if cu_seqlens.layout != torch.strided:
        raise TypeError(f"{name}: cu_seqlens must be a dense tensor, got {cu_seqlens.layout}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{name}: cu_seqlens must be on {x.device} like the input, got {cu_seqlens.device}")
    if not synchronize and not values_at_hand(cu_seqlens):
        return None
    bounds = cu_seqlens.tolist()
    checks.check_bounds(name, bounds, x.shape[1])
    return bounds


def refuse_with_context_parallel(name: str, **given: object) -> None:
    """Raises on arguments that say more of a sequence than one rank's part of it knows."""
    for argument, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: {argument} is not supported with context_parallel, whose sequence lies on several ranks: "
                f"leave it out, or call context_parallel(model, None) first"
            )
