"""Linear layers and embeddings whose weights are split over the ranks of a process group.

A column-parallel layer holds some of the outputs, a row-parallel layer some of the inputs: one after the other they
need one collective at each end. With sequence_parallel the activations outside of them are split along the first
dimension (batch * length) as well, and the collectives are all-gather and reduce-scatter instead of all-reduce.
"""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import typing
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._torch import autocast_dtype, no_autocast
from mamba_ssm.distributed.distributed_utils import (
    all_gather_raw,
    all_reduce,
    all_reduce_raw,
    get_dim_for_local_rank,
    reduce_scatter,
    reduce_scatter_raw,
)
from mamba_ssm.ops.norm import RMSNorm, rms_norm_fn


class ParallelLinearFunc(torch.autograd.Function):
    """y = x weight^T with x gathered from the ranks (sequence_parallel), or the same on all of them.

    Keeps the part of x that came; backward gathers it again while the gradient of x is computed.
    """

    @staticmethod
    def forward(
        ctx: typing.Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        process_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.process_group, ctx.sequence_parallel, ctx.has_bias = process_group, sequence_parallel, bias is not None
        ctx.save_for_backward(x, weight)
        with no_autocast(x):
            return F.linear(all_gather_raw(x, process_group)[0] if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: typing.Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        group, parallel = ctx.process_group, ctx.sequence_parallel
        dx = dweight = dbias = gathering = reducing = None
        with no_autocast(dy):
            if need_dweight and parallel:
                x, gathering = all_gather_raw(x, group, async_op=True)
            if need_dx:
                dx, reducing = (reduce_scatter_raw if parallel else all_reduce_raw)(dy @ weight, group, async_op=True)
            if need_dweight:
                if gathering is not None:
                    gathering.wait()
                dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2)
            if ctx.has_bias and need_dbias:
                dbias = dy.flatten(0, -2).sum(0)
            if reducing is not None:
                reducing.wait()
        return dx, dweight, dbias, None, None


def parallel_linear_func(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> torch.Tensor:
    """x (..., I) times weight (O, I)^T, plus bias; see ColumnParallelLinear. Under autocast all is cast first."""
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return ParallelLinearFunc.apply(x, weight, bias, process_group, sequence_parallel)


class SumGradientFunc(torch.autograd.Function):
    """weight as it is; the gradient of its rows in the ranges is summed over the ranks."""

    @staticmethod
    def forward(
        ctx: typing.Any,
        weight: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        process_group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.ranges, ctx.process_group = ranges, process_group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: typing.Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = torch.cat([grad[begin:end] for begin, end in ctx.ranges])
        total, _ = all_reduce_raw(parts, ctx.process_group)
        grad, sizes = grad.clone(), [end - begin for begin, end in ctx.ranges]
        for (begin, end), part in zip(ctx.ranges, total.split(sizes), strict=True):
            grad[begin:end] = part
        return grad, None, None


class ColumnParallelLinear(nn.Linear):
    """This rank's rows of a linear layer's weight: x -> this rank's part of the outputs.

    Args:
        in_features, out_features: of the whole layer. multiple_of: each rank's part is a multiple of it.
        sequence_parallel: x is this rank's part of the first dimension, and is gathered; else x is whole.
        shared: ranges (begin, end) of this rank's rows that every rank has beside its part of the others: they start
            as the first rank's, and their gradient is summed over the ranks. out_features is without them.

    The gradient of x is summed over the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: dist.ProcessGroup | None,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        shared: Sequence[tuple[int, int]] = (),
    ) -> None:
        local = _local_features("out_features", out_features, process_group, multiple_of)
        local += sum(end - begin for begin, end in shared)
        super().__init__(in_features, local, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.shared = tuple(shared)
        self._start_alike()

    @torch.no_grad()
    def _start_alike(self) -> None:
        first = 0 if self.process_group is None else dist.get_global_rank(self.process_group, 0)
        for parameter in self.parameters():
            for begin, end in self.shared if not parameter.is_meta else ():
                rows = parameter[begin:end].contiguous()
                dist.broadcast(rows, src=first, group=self.process_group)
                parameter[begin:end] = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, ..., in_features) -> (N, ..., local outputs); N is world times larger with sequence_parallel."""
        weight, bias = self.weight, self.bias
        if self.shared:
            weight = SumGradientFunc.apply(weight, self.shared, self.process_group)
            bias = None if bias is None else SumGradientFunc.apply(bias, self.shared, self.process_group)
        return parallel_linear_func(x, weight, bias, self.process_group, self.sequence_parallel)


class RowParallelLinear(nn.Linear):
    """This rank's columns of a linear layer's weight; the ranks' products are summed. The bias lies on rank 0.

    Args:
        in_features, out_features: of the whole layer. multiple_of: each rank's part is a multiple of it.
        sequence_parallel: the sum is split along the first dimension (reduce-scatter); else all ranks get all of it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: dist.ProcessGroup | None,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        local = _local_features("in_features", in_features, process_group, multiple_of)
        bias = bias and dist.get_rank(process_group) == 0
        super().__init__(local, out_features, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, ..., local inputs) -> (N, ..., out_features); N is world times smaller with sequence_parallel."""
        reduce = reduce_scatter if self.sequence_parallel else all_reduce
        return reduce(F.linear(x, self.weight, self.bias), self.process_group)


class SharedRMSNorm(RMSNorm):
    """RMSNorm whose weight, which starts as ones, is the same on all ranks, each of which norms its own rows: the
    gradient of the weight is summed over them.
    """

    def __init__(self, hidden_size: int, process_group: dist.ProcessGroup | None, **options: typing.Any) -> None:
        super().__init__(hidden_size, **options)
        self.process_group = process_group

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # no residual, nothing but the norm
        return typing.cast(torch.Tensor, rms_norm_fn(x, self.shared_weight(), None, eps=self.eps))

    def shared_weight(self) -> torch.Tensor:
        """The weight, for operators that norm with it: its gradient is summed over the ranks."""
        return typing.cast(
            torch.Tensor, SumGradientFunc.apply(self.weight, ((0, len(self.weight)),), self.process_group)
        )


class VocabParallelEmbedding(nn.Embedding):
    """This rank's rows of an embedding; zeros for tokens of other ranks, so the ranks' results are to be summed.

    process_group None: a whole embedding.
    """

    def __init__(
        self,
        num_embeddings: int,
        *args: typing.Any,
        process_group: dist.ProcessGroup | None = None,
        padding_idx: int | None = None,
        **kwargs: typing.Any,
    ) -> None:
        self.process_group = process_group
        if process_group is not None:
            if padding_idx is not None:
                raise ValueError(
                    "VocabParallelEmbedding: padding_idx is not supported with a process_group, "
                    f"got padding_idx {padding_idx}"
                )
            num_embeddings = _share("num_embeddings", num_embeddings, process_group)
        kwargs["padding_idx"] = padding_idx
        super().__init__(num_embeddings, *args, **kwargs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids (...) -> (..., embedding_dim)."""
        if self.process_group is None:
            return super().forward(input)
        local = input - dist.get_rank(self.process_group) * self.num_embeddings
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        embeddings = super().forward(local.masked_fill(elsewhere, 0))
        return embeddings.masked_fill(elsewhere[..., None], 0)


class ColumnParallelEmbedding(nn.Embedding):
    """This rank's columns of an embedding. process_group None: a whole embedding."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: typing.Any,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: typing.Any,
    ) -> None:
        self.process_group = process_group
        if process_group is not None:
            embedding_dim = _share("embedding_dim", embedding_dim, process_group)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)


class ParallelEmbeddings(nn.Module):
    """Word embeddings, and position embeddings if max_position_embeddings > 0, with weights split over the ranks.

    With sequence_parallel the result is this rank's part of the first dimension, else all ranks get all of it.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: dist.ProcessGroup | None,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"process_group": process_group, "device": device, "dtype": dtype}
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, **factory)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(max_position_embeddings, embed_dim, **factory)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, combine_batch_seqlen_dim: bool = False
    ) -> torch.Tensor:
        """input_ids, position_ids (B, L) -> (B, L, embed_dim), or (B * L, embed_dim) with combine_batch_seqlen_dim.

        position_ids None: 0..L-1. With sequence_parallel the first of these dimensions is this rank's part of it.
        """
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], dtype=torch.long, device=input_ids.device)
            positions = self.position_embeddings(position_ids)
            if self.process_group is not None:  # its columns are this rank's, its place in the sum over ranks is zero
                width = positions.shape[-1]
                before = dist.get_rank(self.process_group) * width
                positions = F.pad(positions, (before, embeddings.shape[-1] - before - width))
            embeddings = embeddings + positions
        if combine_batch_seqlen_dim:
            embeddings = embeddings.flatten(0, 1)
        if self.process_group is None or dist.get_world_size(self.process_group) == 1:
            return embeddings
        return (reduce_scatter if self.sequence_parallel else all_reduce)(embeddings, self.process_group)


def _local_features(name: str, features: int, process_group: dist.ProcessGroup | None, multiple_of: int) -> int:
    """This rank's part of the features; there must be something for every rank."""
    world = dist.get_world_size(process_group)
    local = get_dim_for_local_rank(features, world, dist.get_rank(process_group), multiple_of)
    if features // multiple_of < world:
        raise ValueError(f"{name} ({features}, in multiples of {multiple_of}) cannot be split over {world} ranks")
    return local


def _share(name: str, size: int, process_group: dist.ProcessGroup | None) -> int:
    """An even part of size."""
    world = dist.get_world_size(process_group)
    if size % world:
        raise ValueError(f"{name} must be a multiple of the {world} ranks of process_group, got {size}")
    return size // world
