"""Collectives with gradients, and what keeps parameters of parallel ranks alike.

Everything works along the first dimension, on gloo and on NCCL. process_group None is the default group.
"""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import typing

import torch
import torch.distributed as dist
import torch.nn as nn


def all_gather_raw(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """The ranks' tensors one after the other, (world * N, ...) from (N, ...), and the work handle (None if waited for).

    All ranks give the same shape.
    """
    world = dist.get_world_size(process_group)
    input_ = input_.contiguous()
    output = input_.new_empty((world * input_.shape[0], *input_.shape[1:]))
    if dist.get_backend(process_group) == "gloo":  # which has no all_gather_into_tensor in older torch versions
        handle = dist.all_gather(list(output.chunk(world)), input_, group=process_group, async_op=async_op)
    else:
        # by its name since torch 2.13, where the other one warns
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        handle = gather(output, input_, group=process_group, async_op=async_op)
    return output, handle


def reduce_scatter_raw(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """This rank's share of the sum over ranks, (N / world, ...) from (N, ...), and the work handle."""
    world = dist.get_world_size(process_group)
    length = input_.shape[0]
    if length % world:
        raise ValueError(
            f"reduce_scatter: the first dimension must be a multiple of the {world} ranks, got shape "
            f"{tuple(input_.shape)}: pad batch * length to a multiple, or use sequence_parallel=False"
        )
    if dist.get_backend(process_group) == "gloo":  # which has no reduce_scatter in older torch versions
        total, handle = all_reduce_raw(input_, process_group, async_op)
        return total.chunk(world)[dist.get_rank(process_group)], handle
    output = input_.new_empty((length // world, *input_.shape[1:]))
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    handle = scatter(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def all_reduce_raw(
    input_: torch.Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """The sum over ranks, a new tensor, and the work handle."""
    output = input_.clone(memory_format=torch.contiguous_format)
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, input_: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: typing.Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_raw(grad, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, input_: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: typing.Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_raw(grad, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: typing.Any, input_: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
        return all_reduce_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: typing.Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_gather(input_: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """all_gather_raw's tensor; its gradient is reduce_scatter's."""
    return AllGatherFunc.apply(input_, process_group)


def reduce_scatter(input_: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """reduce_scatter_raw's tensor; its gradient is all_gather's."""
    return ReduceScatterFunc.apply(input_, process_group)


def all_reduce(input_: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over ranks. Every rank goes on with the same sum, so the gradient passes through as it is."""
    return AllReduceFunc.apply(input_, process_group)


def sync_shared_params(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Gives parameters marked `_shared_params` the values of the group's first rank."""
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    for _, parameter in sorted(model.named_parameters()):
        if getattr(parameter, "_shared_params", False):
            with torch.no_grad():
                dist.broadcast(parameter, src=first, group=process_group)


def allreduce_sequence_parallel_grad(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Sums over ranks the gradients of parameters marked `_sequence_parallel`: each rank saw a part of the sequence.

    Call it between backward and the optimizer's step. Every rank must have gradients for the same parameters.
    """
    marked = (p for _, p in sorted(model.named_parameters()) if getattr(p, "_sequence_parallel", False))
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in marked:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        with torch.no_grad():
            total = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(total, group=process_group)
            summed = total.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, summed, strict=True):
                gradient.copy_(part.view(gradient.shape))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This rank's part of dim: multiples of multiple_of, as even as can be, the first ranks take what is left over."""
    if dim % multiple_of:
        raise ValueError(f"get_dim_for_local_rank: dim ({dim}) must be a multiple of multiple_of ({multiple_of})")
    whole, left = divmod(dim // multiple_of, world_size)
    return (whole + int(local_rank < left)) * multiple_of
