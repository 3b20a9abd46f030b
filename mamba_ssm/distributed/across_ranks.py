"""Convolution and scans of a sequence whose neighbouring parts lie on neighbouring ranks of a process group.

A scan is linear in its state. So each rank first finds what its part passes on: the state that it ends with if it
starts from zero, and the factor by which it multiplies what it starts with, which takes a fraction of a scan. These
small pairs are gathered, every rank folds those of the ranks before it, and runs its scan once from the right state.
Backward is the same in the other direction. All ranks must call the same functions, backward too, in the same order.
Parts may have different lengths, also 0 and less than the convolution's width.
"""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import math
import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import call, make, no_autocast, outside_graphs, refuse_second_derivatives, unpack
from mamba_ssm.distributed.distributed_utils import all_gather, all_gather_raw, reduce_scatter_raw
from mamba_ssm.ops.carry import fold
from mamba_ssm.ops.causal_conv1d.backward import causal_conv1d_backward_op
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_op, wants_silu
from mamba_ssm.ops.mamba2_block import carried as mamba2_part
from mamba_ssm.ops.mamba2_block.arguments import Inputs as Mamba2Inputs
from mamba_ssm.ops.mamba2_block.arguments import Options as Mamba2Options
from mamba_ssm.ops.mamba2_block.backward import of_inputs
from mamba_ssm.ops.mamba3_scan import States, mamba3_scan
from mamba_ssm.ops.mamba3_scan.parts import outer, project, rotate
from mamba_ssm.ops.mamba_block import BlockInputs, mamba_block_part
from mamba_ssm.ops.selective_scan.arguments import Inputs as ScanInputs
from mamba_ssm.ops.selective_scan.arguments import Options as ScanOptions
from mamba_ssm.ops.selective_scan.carry import carried_backward, carried_forward, scan_carry


@outside_graphs
def mamba_across_ranks(inputs: BlockInputs, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """mamba_block of this rank's part, (B, L, d_model), as one autograd node."""
    return mamba_block_part(inputs, _Neighbours(process_group))


@outside_graphs
def causal_conv1d_across_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    process_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """causal_conv1d_fn of this rank's part x (B, D, L); the inputs before it come from the ranks before."""
    return _Convolution.apply(process_group, wants_silu("causal_conv1d", activation), x, weight, bias)


@outside_graphs
def selective_scan_across_ranks(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    process_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """selective_scan_fn of this rank's part: u, delta, z (B, D, L), B and C (B, N, L) or (B, G, N, L)."""
    A, D, delta_bias = checks.widen(A), checks.widen(D), checks.widen(delta_bias)
    return _SelectiveScan.apply(process_group, bool(delta_softplus), u, delta, A, B, C, D, z, delta_bias)


@outside_graphs
def mamba2_across_ranks(
    inputs: Mamba2Inputs, options: Mamba2Options, gate: bool, process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """mamba_split_conv1d_scan_combined of this rank's part, (B, L, d_mlp + H P), as one autograd node.

    inputs, options: as of its operators, A as A_log; no states, seq_idx or reverse. gate: False for the scan's output
    alone, (B, L, H P), without norm, gate and gated MLP, and without a norm's weight among the inputs.
    """
    dt_bias, A, D = (checks.widen(tensor) for tensor in (inputs.dt_bias, inputs.A, inputs.D))
    inputs = inputs._replace(dt_bias=dt_bias, A=A, D=D)
    if _wants_gradients(inputs):
        return _Mamba2.apply(process_group, options, gate, *inputs)
    return mamba2_part.part_forward(inputs, options, gate, _Neighbours(process_group))[0]


@outside_graphs
def mamba3_scan_across_ranks(
    arguments: typing.Mapping[str, typing.Any], process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """mamba3_scan(**arguments) of this rank's part, of at least one step; without states and packed sequences.

    A first scan computes what a part passes on, a second one its output. Both take the same time, so none is saved.
    """
    V, DT = arguments["V"], arguments["DT"]
    if V.shape[1] == 0:
        raise ValueError("mamba3_scan_across_ranks: every rank's part needs at least one step, got 0 on this one")
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    with no_autocast(V):
        edge = V.flatten()[:0].sum().float()  # so that backward runs on every rank
        if rank < world - 1:
            not_for_states = dict.fromkeys(("D", "Z", "MIMO_Z", "norm_weight"))
            _, own = mamba3_scan(**{**arguments, **not_for_states}, return_final_states=True)
        else:
            own = _mamba3_states(V, arguments["Q"], arguments["Angles"])
        factor = torch.exp(arguments["ADT"].float().sum(1))
        boundary = (1 - torch.sigmoid(arguments["Trap"][:, 0].float())) * DT[:, 0].float()
        passed = [*own, factor, boundary]
        sizes = [tensor.numel() for tensor in passed]
        everyone = all_gather(torch.cat([(tensor + edge).flatten() for tensor in passed])[None], process_group)
        before = States(*(torch.zeros_like(state) + everyone[:0].sum() for state in own))
        for row in everyone[:rank].unbind():
            parts = (part.view_as(like) for part, like in zip(row.split(sizes), passed, strict=True))
            before = _mamba3_pass_on(before, arguments, *parts)
    return typing.cast(torch.Tensor, mamba3_scan(**arguments, initial_states=before))


def _mamba3_states(V: torch.Tensor, Q: torch.Tensor, Angles: torch.Tensor) -> States:
    """Zero states."""
    batch, heads, dstate = V.shape[0], V.shape[2], Q.shape[4]
    shapes = (heads, Angles.shape[-1]), (heads, V.shape[3], dstate), (Q.shape[2], heads, dstate), (heads, V.shape[3])
    return States(*(V.new_zeros((batch, *shape), dtype=torch.float32) for shape in shapes))


def _mamba3_pass_on(
    before: States,
    arguments: typing.Mapping[str, typing.Any],
    angle: torch.Tensor,
    ssm: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    factor: torch.Tensor,
    boundary: torch.Tensor,
) -> States:
    """The states behind a part, from those before it and the part's own, whose angles start from 0."""
    rows = project(before.v, arguments.get("MIMO_V"), k.shape[1])
    entering = before.ssm + boundary[..., None, None] * outer(rows, before.k)
    pairwise = arguments.get("pairwise", True)
    return States(
        torch.remainder(before.angle + angle, 2 * math.pi),
        factor[..., None, None] * entering + rotate(ssm, before.angle[:, :, None], pairwise),
        rotate(k, before.angle[:, None], pairwise),
        v,
    )


# ---- what ranks pass on ----------------------------------------------------------------------------------------------


class _Neighbours:
    """The parts before and behind this rank's, in one call and its backward; see ops/carry.py's Neighbours."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world, self.group = dist.get_rank(group), dist.get_world_size(group), group

    def send_inputs(self, x: torch.Tensor, steps: int) -> None:
        self.shape = *x.shape[:2], steps
        self.kept = kept = min(steps, x.shape[2])  # of the last inputs, which the next rank wants
        tail = x[..., x.shape[2] - kept :].flatten(0, 1)
        if self.world > 2:  # ranks from the third on must know which of them exist
            tail = torch.cat([tail, tail.new_ones(1, kept)])
        if kept < steps:
            tail = F.pad(tail, (steps - kept, 0))
        self.sent = all_gather_raw(tail[None], self.group, async_op=True)

    def inputs_before(self) -> torch.Tensor:
        everyone, work = self.sent
        del self.sent
        if work is not None:
            work.wait()
        if self.rank == 0:
            return everyone.new_zeros(self.shape)
        if self.rank == 1:
            return everyone[0, : self.shape[0] * self.shape[1]].view(self.shape)
        # the last inputs of all ranks before, without the gaps that parts shorter than `steps` leave
        steps = self.shape[2]
        before = everyone[: self.rank].movedim(0, 1).flatten(1)
        self.order = before[-1].argsort(stable=True)[-steps:]
        return before[:-1, self.order].view(self.shape)

    def add_input_gradients(self, dbefore: torch.Tensor, dx: torch.Tensor) -> None:
        dtails = dbefore.new_zeros((self.world, *dbefore.shape), dtype=torch.float32)
        if self.rank == 1:
            dtails[0] = dbefore
        elif self.rank:
            every = dtails.movedim(0, 2).flatten(2)
            every[..., self.order] = dbefore.float()
            dtails = every.unflatten(2, (self.world, -1)).movedim(2, 0)
        dtail = reduce_scatter_raw(dtails, self.group)[0][0]
        if self.kept:
            dx[..., dx.shape[2] - self.kept :] += dtail[..., dtail.shape[2] - self.kept :]

    def state_before(self, passed_on: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        everyone, _ = all_gather_raw(passed_on[None], self.group)
        if self.rank == 1:  # from zero on
            return everyone[0, : shape.numel()].view(shape)
        return fold(everyone[: self.rank], shape) if self.rank else None

    def gradient_after(self, passed_on: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        everyone, _ = all_gather_raw(passed_on[None], self.group)
        return fold(everyone[self.rank + 1 :], shape, from_end=True) if self.rank < self.world - 1 else None


def _wants_gradients(tensors: typing.Iterable[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


# ---- one autograd node each ------------------------------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: typing.Any,
        group: dist.ProcessGroup | None,
        silu: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.neighbours, ctx.silu = _Neighbours(group), silu
        ctx.neighbours.send_inputs(x, weight.shape[1] - 1)
        before = ctx.neighbours.inputs_before()
        ctx.save_for_backward(x, weight, bias, before)
        return call(causal_conv1d_op, x, weight, bias, None, before, False, silu, False)[0]

    @staticmethod
    def backward(ctx: typing.Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("a gradient under context parallel")
        x, weight, bias, before = ctx.saved_tensors
        arguments = dout, None, x, weight, bias, None, before, True, ctx.silu, False
        dx, dweight, dbias, dbefore = call(causal_conv1d_backward_op, *arguments)
        ctx.neighbours.add_input_gradients(dbefore, dx)
        return None, None, dx, dweight, dbias


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: typing.Any, group: dist.ProcessGroup | None, delta_softplus: bool, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.neighbours, ctx.options = _Neighbours(group), ScanOptions(delta_softplus)
        carry = scan_carry(make(ScanInputs, (*tensors, None, None)), ctx.options)
        before = ctx.neighbours.state_before(carry.passed_on, carry.shape)
        A = typing.cast(torch.Tensor, tensors[2])
        before = None if before is None else before.unflatten(1, A.shape)
        out, checkpoints = carried_forward(make(ScanInputs, (*tensors, before, None)), ctx.options, carry)
        ctx.save_for_backward(*tensors, before, checkpoints)
        return out

    @staticmethod
    def backward(ctx: typing.Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("a gradient under context parallel")
        *tensors, checkpoints = ctx.saved_tensors
        inputs = make(ScanInputs, (*tensors, None))
        carry = scan_carry(inputs, ctx.options, dout)
        dlast = ctx.neighbours.gradient_after(carry.passed_on, carry.shape)
        *grads, _, _ = carried_backward(dout, dlast, inputs, checkpoints, ctx.options, carry)
        return None, None, *grads


class _Mamba2(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: typing.Any,
        group: dist.ProcessGroup | None,
        options: Mamba2Options,
        gate: bool,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = options, gate, _Neighbours(group)
        out, kept = mamba2_part.part_forward(make(Mamba2Inputs, tensors), *ctx.call)
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: typing.Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("a gradient under context parallel")
        inputs, kept = unpack(ctx.saved_tensors, Mamba2Inputs, mamba2_part.Carried)
        grads, _ = of_inputs(mamba2_part.part_backward(dout, inputs, kept, *ctx.call))
        return None, None, None, *grads
