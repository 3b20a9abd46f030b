"""Context parallel: one sequence over several ranks, each of which holds a part of it.

group = dist.group.WORLD
model = context_parallel(MambaLMHeadModel(config).to(device), group)
inputs, targets = (split_sequence(tokens, group) for tokens in (tokens[:, :-1], tokens[:, 1:]))
loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
loss.backward()
"""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import typing

import torch
import torch.distributed as dist
import torch.nn as nn

_Module = typing.TypeVar("_Module", bound=nn.Module)


def context_parallel(module: _Module, process_group: typing.Any) -> _Module:
    """Has every Mamba, Mamba2 and Mamba3 in module work on its rank's part of the sequence; returns module.

    Args:
        module: a block, or a model of blocks (MambaLMHeadModel). What else is in it works on each step alone, as
            embeddings, norms, MLPs and heads do: attention and other kinds of Mamba-2 are an error.
        process_group: a ProcessGroup or a DeviceMesh of one dimension, on gloo or NCCL. Rank r of it holds the part of
            the sequence behind that of rank r - 1. None: each rank has whole sequences again.

    Then module takes (B, L, ...) with L the length of this rank's part, and returns that part of what one process would
    return, to rounding. Parts may have different lengths (see split_sequence), also 0, for Mamba3 at least 1. B is the
    same on all ranks.

    All ranks must call module, and backward: they wait for each other. A rank whose output is in no loss calls
    (out.sum() * 0).backward(). Each rank gets what its part of the sequence contributes to the gradients of all ranks'
    losses: summed over ranks they are the gradients of the sum of the losses; averaged, as DDP and FSDP do, those of
    the mean. So the parameters must be averaged over this group too.

    Not with seq_idx, cu_seqlens, inference_params, nor Mamba2's process_group. torch.compile breaks its graph at what
    ranks exchange. Mamba3 scans twice: that saves memory, not time.
    """
    group = process_group if process_group is None else _group(process_group)
    found = False
    for name, part in module.named_modules():
        if getattr(part, "supports_context_parallel", True) is False and group is not None:
            raise ValueError(
                f"context_parallel: {name or 'the module'} is a {type(part).__name__}, which needs the whole sequence; "
                "Mamba, Mamba2 and Mamba3 work on parts of it"
            )
        if hasattr(type(part), "context_parallel_group"):
            part.context_parallel_group = group
            found = True
    if not found:
        raise ValueError(f"context_parallel: no Mamba, Mamba2 or Mamba3 in this {type(module).__name__}")
    return module


def split_sequence(tensor: torch.Tensor, process_group: typing.Any, dim: int = 1) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have, as a view: as even as can be, the first ranks' longer by 1."""
    group = _group(process_group)
    return tensor.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _group(process_group: typing.Any) -> dist.ProcessGroup:
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    if hasattr(process_group, "get_group") and hasattr(process_group, "ndim"):
        if process_group.ndim != 1:
            raise ValueError(
                f"context_parallel: a DeviceMesh must have one dimension, got {process_group}: take mesh['name']"
            )
        return process_group.get_group()
    raise TypeError(
        f"context_parallel: process_group must be a ProcessGroup or a DeviceMesh, got {type(process_group).__name__}"
    )
