"""Convolution and scans of a sequence whose neighbouring parts lie on neighbouring ranks of a process group.

A scan is linear in its state. So each rank first finds what its part passes on: the state that it ends with if it
starts from zero, and the factor by which it multiplies what it starts with, which takes a fraction of a scan. These
small pairs are gathered, every rank folds those of the ranks before it, and runs its scan once from the right state.
Backward is the same in the other direction. All ranks must call the same functions, backward too, in the same order.
Parts may have different lengths, also 0 and less than the convolution's width.
"""

from __future__ import annotations  # ProcessGroup is not there in a torch built without distributed

import functools
import math
import typing
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_ssm import _checks as checks
from mamba_ssm._torch import call, make, no_autocast
from mamba_ssm.distributed.distributed_utils import all_gather, all_gather_raw, reduce_scatter_raw
from mamba_ssm.ops.carry import pass_on
from mamba_ssm.ops.causal_conv1d.backward import causal_conv1d_backward_op
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_op, wants_silu
from mamba_ssm.ops.mamba3_scan import States, mamba3_scan
from mamba_ssm.ops.mamba3_scan.parts import outer, project, rotate
from mamba_ssm.ops.selective_scan.arguments import Inputs as ScanInputs
from mamba_ssm.ops.selective_scan.arguments import Options as ScanOptions
from mamba_ssm.ops.selective_scan.carry import carried_backward, carried_forward, scan_carry
from mamba_ssm.ops.ssd.arguments import Options as ChunkOptions
from mamba_ssm.ops.ssd.arguments import Ungated, check_options, with_gate
from mamba_ssm.ops.ssd.backward import ssd_backward_op
from mamba_ssm.ops.ssd.carry import ssd_carry
from mamba_ssm.ops.ssd.forward import ssd_op


def _outside_graphs(function: Callable[..., typing.Any]) -> Callable[..., typing.Any]:
    """torch.compiler.disable(function), made at the first call: at import it would load the compiler."""

    made: list[Callable[..., typing.Any]] = []

    @functools.wraps(function)
    def outside(*arguments: typing.Any) -> typing.Any:
        if not made:
            made.append(torch.compiler.disable(function))
        return made[0](*arguments)

    return outside


@_outside_graphs
def causal_conv1d_across_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    process_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """causal_conv1d_fn of this rank's part x (B, D, L); the inputs before it come from the ranks before."""
    return _Convolution.apply(process_group, wants_silu("causal_conv1d", activation), x, weight, bias)


@_outside_graphs
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


@_outside_graphs
def chunk_scan_across_ranks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    process_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """mamba_chunk_scan_combined of this rank's part: x (B, L, H, P), dt (B, L, H), B and C (B, L, G, N)."""
    A, D, dt_bias = checks.widen(A), checks.widen(D), checks.widen(dt_bias)
    options = ChunkOptions(bool(dt_softplus), *check_options("chunk_scan_across_ranks", 1, dt_limit, None))
    return _ChunkScan.apply(process_group, options, x, dt, A, B, C, D, dt_bias)


@_outside_graphs
def mamba3_scan_across_ranks(
    arguments: typing.Mapping[str, typing.Any], process_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """mamba3_scan(**arguments) of this rank's part, of at least one step; without states and packed sequences.

    What a part passes on is found by a scan as long as the second one, which does the work: that saves no time.
    """
    V, DT = arguments["V"], arguments["DT"]
    if V.shape[1] == 0:
        raise ValueError("mamba3_scan_across_ranks: every rank's part needs at least one step, got 0 on this one")
    place = _place(process_group)
    with no_autocast(V):
        edge = V.flatten()[:0].sum().float()  # so that backward comes by on every rank
        if place.rank < place.world - 1:
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
        for row in everyone[: place.rank].unbind():
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


def _gather(tensors: typing.Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Each of the tensors, which have one dtype, of all ranks, (world, ...): in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    everyone, _ = all_gather_raw(flat[None], group)
    parts = everyone.split([tensor.numel() for tensor in tensors], dim=1)
    return [part.reshape(part.shape[0], *tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class _Place(typing.NamedTuple):
    """This rank in its group."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    def state_before(
        self, state: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """From what this rank's part passes on: the state before it (None: zero), and all later parts' factors."""
        states, factors = _gather((state, factor), self.group)
        before = pass_on(states[: self.rank], factors[: self.rank])[0] if self.rank else None
        return before, factors[self.rank + 1 :] if self.rank < self.world - 1 else None

    def gradient_after(self, state: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor | None:
        """From what this rank's part passes back: the gradient of the state behind it (None: zero)."""
        (states,) = _gather((state,), self.group)
        return None if factors is None else pass_on(states[self.rank + 1 :].flip(0), factors.flip(0))[0]


def _place(group: dist.ProcessGroup | None) -> _Place:
    return _Place(dist.get_rank(group), dist.get_world_size(group), group)


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
        ctx.place, ctx.silu = _place(group), silu
        steps = weight.shape[1] - 1
        ctx.kept = kept = min(steps, x.shape[2])  # of the last inputs, which the next rank wants
        tail = F.pad(x[..., x.shape[2] - kept :], (steps - kept, 0))
        exists = x.new_zeros(steps)
        exists[steps - kept :] = 1
        tails, exist = (everyone[: ctx.place.rank] for everyone in _gather((tail, exists), group))
        before, ctx.order = torch.zeros_like(tail), None
        if ctx.place.rank == 1:
            ctx.order, before = torch.arange(steps, device=x.device), tails[0]
        elif ctx.place.rank:
            # the last inputs of all ranks before, without the gaps that parts shorter than `steps` leave
            ctx.order = exist.flatten().argsort(stable=True)[-steps:]
            before = tails.movedim(0, 2).flatten(2)[..., ctx.order]
        ctx.save_for_backward(x, weight, bias, before)
        return call(causal_conv1d_op, x, weight, bias, None, before, False, silu, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: typing.Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, before = ctx.saved_tensors
        place, steps = ctx.place, before.shape[2]
        arguments = dout, None, x, weight, bias, None, before, True, ctx.silu, False
        dx, dweight, dbias, dbefore = call(causal_conv1d_backward_op, *arguments)
        dtails = dbefore.new_zeros((*dbefore.shape[:2], place.world * steps))
        if ctx.order is not None:
            dtails[..., ctx.order] = dbefore
        dtails = dtails.unflatten(2, (place.world, steps)).movedim(2, 0)
        dtail = reduce_scatter_raw(dtails.float(), place.group)[0][0]
        if ctx.kept:
            dx[..., x.shape[2] - ctx.kept :] += dtail[..., steps - ctx.kept :]
        return None, None, dx, dweight, dbias


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: typing.Any, group: dist.ProcessGroup | None, delta_softplus: bool, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.place, ctx.options = _place(group), ScanOptions(delta_softplus)
        carry = scan_carry(make(ScanInputs, (*tensors, None, None)), ctx.options)
        before, factors = ctx.place.state_before(carry.state, carry.factor)
        out, checkpoints = carried_forward(make(ScanInputs, (*tensors, before, None)), ctx.options, carry)
        ctx.save_for_backward(*tensors, before, checkpoints, factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: typing.Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, checkpoints, factors = ctx.saved_tensors
        inputs = make(ScanInputs, (*tensors, None))
        carry = scan_carry(inputs, ctx.options, dout)
        dlast = ctx.place.gradient_after(carry.state, factors)
        *grads, _, _ = carried_backward(dout, dlast, inputs, checkpoints, ctx.options, carry)
        return None, None, *grads


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: typing.Any, group: dist.ProcessGroup | None, options: ChunkOptions, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.place, ctx.options = _place(group), options
        before, factors = ctx.place.state_before(*ssd_carry(make(Ungated, (*tensors, None, None)), options))
        ctx.save_for_backward(*tensors, before, factors)
        inputs = with_gate(make(Ungated, (*tensors, before, None)), None)
        return call(ssd_op, *inputs, *options, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: typing.Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, factors = ctx.saved_tensors
        inputs = make(Ungated, (*tensors, None))
        dfinal = ctx.place.gradient_after(ssd_carry(inputs, ctx.options, dout)[0], factors)
        *grads, _ = call(ssd_backward_op, dout, dfinal, *inputs, *ctx.options, False)
        return None, None, *grads
