"""The inside of a Mamba block that runs in both directions of time, as one memory-saving autograd node.

Each direction has a convolution, projections and a scan of its own; x, z and the output projection are shared (Vision
Mamba, arXiv 2401.09417, algorithm 1). The kernels go backwards in time themselves: nothing is flipped.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import (
    autocast_dtype,
    call,
    call_below_autograd,
    call_in_backward,
    define,
    no_autocast,
    no_gradients,
    reference,
    returns,
    signature,
    unpack,
)
from mamba_ssm.ops.mamba_block.arguments import Inputs, Kept, Options, channel_major, check
from mamba_ssm.ops.mamba_block.backward import finish_backward, out_proj_backward, scan_backward
from mamba_ssm.ops.mamba_block.forward import mamba_inner_fn, scan_forward
from mamba_ssm.ops.mamba_block.projections import from_columns
from mamba_ssm.ops.selective_scan.arguments import check_fake


class Direction(typing.NamedTuple):
    """What each direction has for itself; shapes as for mamba_inner_fn."""

    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    x_proj_weight: torch.Tensor
    delta_proj_weight: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor | None
    delta_bias: torch.Tensor | None


class Shared(typing.NamedTuple):
    """What both directions share."""

    xz: torch.Tensor
    out_proj_weight: torch.Tensor
    out_proj_bias: torch.Tensor | None


class Backwards(typing.NamedTuple):
    """Direction, of the one that goes from the last step to the first."""

    conv1d_weight_b: torch.Tensor
    conv1d_bias_b: torch.Tensor | None
    x_proj_weight_b: torch.Tensor
    delta_proj_weight_b: torch.Tensor
    A_b: torch.Tensor
    D_b: torch.Tensor | None
    delta_bias_b: torch.Tensor | None


def mamba_inner_both(
    xz: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    forwards: Direction,
    backwards: Direction,
) -> torch.Tensor:
    """The sum of both directions' gated scans of xz (B, 2D, L) through the output projection: (B, L, d_model).

    dt = softplus(delta + delta_bias). Under autocast xz and the projections are cast to autocast's dtype.
    """
    if reference.on:
        y, y_b = (
            mamba_inner_fn(xz, *of[:4], out_proj_weight, None, of.A, D=of.D, delta_bias=of.delta_bias, reverse=reverse)
            for of, reverse in ((forwards, False), (backwards, True))
        )
        return y + y_b if out_proj_bias is None else y + y_b + out_proj_bias
    dtype = autocast_dtype(xz)
    if dtype is not None:
        xz, out_proj_weight = checks.cast(xz, dtype), checks.cast(out_proj_weight, dtype)
        forwards, backwards = _cast(forwards, dtype), _cast(backwards, dtype)
    if out_proj_bias is not None:
        out_proj_bias = checks.cast(out_proj_bias, xz.dtype)
    return call(mamba_inner_both_op, xz, out_proj_weight, out_proj_bias, *forwards, *backwards, False)[0]


def _cast(of, dtype):
    conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, *others = of
    projections = checks.cast(x_proj_weight, dtype), checks.cast(delta_proj_weight, dtype)
    return Direction(conv1d_weight, conv1d_bias, *projections, *others)


# ---- operators -------------------------------------------------------------------------------------------------------


class Wanted(typing.NamedTuple):
    """Which of the operator's results a caller wants."""

    keep: bool  # what backward starts from


class KeptOfBoth(typing.NamedTuple):
    """What backward starts from, beside the inputs; see Kept."""

    x_dbl: torch.Tensor | None
    checkpoints: torch.Tensor | None
    x_dbl_b: torch.Tensor | None
    checkpoints_b: torch.Tensor | None


class Results(typing.NamedTuple):
    """The operator's results: the output, and what is kept."""

    out: torch.Tensor
    x_dbl: torch.Tensor | None
    checkpoints: torch.Tensor | None
    x_dbl_b: torch.Tensor | None
    checkpoints_b: torch.Tensor | None


_OPTIONS = tuple(
    Options(delta_softplus=True, rms_eps=0.0, checkpoint_lvl=1, reverse=reverse) for reverse in (False, True)
)


def _directions(shared, *directions):
    """Each direction's inputs as those of the operator for one, and its options, after checks; and the sizes."""
    xz, out_proj_weight, out_proj_bias = shared
    inputs = []
    for conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, D, delta_bias in directions:
        own = conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight
        scan = A, None, None, D, delta_bias, None, None, None, None, None
        inputs.append(Inputs(xz, *own, out_proj_weight, out_proj_bias, *scan))
    sizes = [check(each) for each in inputs]
    return list(zip(inputs, sizes, _OPTIONS, strict=True)), sizes[0]


def _allocate(shared, directions, sizes, keep):
    """The operator's results, without values."""
    kept = []
    for inputs, its_sizes, _ in directions:
        kept.append(inputs.xz.new_empty((inputs.x_proj_weight.shape[0], its_sizes.columns)) if keep else None)
        kept.append(inputs.A.new_empty((its_sizes.scan.checkpoints,)) if keep else None)
    return Results(shared.xz.new_empty((sizes.batch, sizes.seqlen, sizes.d_model)), *kept)


def _forward(*arguments):
    shared, *given, wanted = unpack(arguments, Shared, Direction, Backwards, Wanted)
    directions, sizes = _directions(shared, *given)
    if sizes.columns == 0:
        return _allocate(shared, directions, sizes, wanted.keep)
    xz = channel_major(shared.xz, sizes)
    y, kept = None, []
    for inputs, its_sizes, options in directions:
        y, its_kept, _ = scan_forward(xz, inputs, its_sizes, options, wanted.keep, other=y)
        kept += [its_kept.x_dbl, its_kept.checkpoints]
    out = F.linear(y.t(), shared.out_proj_weight, shared.out_proj_bias)
    return Results(out.view(sizes.batch, sizes.seqlen, sizes.d_model), *kept)


def _forward_fake(*arguments):
    shared, *given, wanted = unpack(arguments, Shared, Direction, Backwards, Wanted)
    directions, sizes = _directions(shared, *given)
    check_fake("mamba_inner_both", shared, *given)
    return _allocate(shared, directions, sizes, wanted.keep)


class Gradients(typing.NamedTuple):
    """The backward operator's results, in the order of the inputs; None for those of absent ones."""

    dxz: torch.Tensor
    dout_proj_weight: torch.Tensor
    dout_proj_bias: torch.Tensor | None
    dconv1d_weight: torch.Tensor
    dconv1d_bias: torch.Tensor | None
    dx_proj_weight: torch.Tensor
    ddelta_proj_weight: torch.Tensor
    dA: torch.Tensor
    dD: torch.Tensor | None
    ddelta_bias: torch.Tensor | None
    dconv1d_weight_b: torch.Tensor
    dconv1d_bias_b: torch.Tensor | None
    dx_proj_weight_b: torch.Tensor
    ddelta_proj_weight_b: torch.Tensor
    dA_b: torch.Tensor
    dD_b: torch.Tensor | None
    ddelta_bias_b: torch.Tensor | None


def _backward(dout, *arguments):
    shared, *given, kept = unpack(arguments, Shared, Direction, Backwards, KeptOfBoth)
    directions, sizes = _directions(shared, *given)
    if sizes.columns == 0:
        tensors = *shared, *given[0], *given[1]
        return Gradients(*(None if tensor is None else torch.zeros_like(tensor) for tensor in tensors))
    xz = channel_major(shared.xz, sizes)
    dout = dout.reshape(sizes.columns, sizes.d_model)
    dy = torch.mm(shared.out_proj_weight.t(), dout.t())
    dxz = xz.new_empty((2 * sizes.dim, sizes.columns))  # the second direction adds to what the first writes
    pending = []
    for (inputs, its_sizes, options), first in zip(directions, (0, 2), strict=True):
        its_kept = Kept(kept[first], kept[first + 1], None, None)
        pending.append(scan_backward(dy, xz, inputs, its_kept, options, its_sizes, dxz, add=options.reverse))
    del dy
    of_out_proj = out_proj_backward(dout, dxz[: sizes.dim], shared.out_proj_bias)
    own = []
    for inputs, its_sizes, options in directions:
        left = pending.pop(0)
        grads = finish_backward(left, of_out_proj, xz, inputs, options, its_sizes, dxz, add=options.reverse)
        own += [grads.dconv1d_weight, grads.dconv1d_bias, grads.dx_proj_weight, grads.ddelta_proj_weight]
        own += [grads.dA, grads.dD, grads.ddelta_bias]
    return Gradients(from_columns(dxz, sizes.batch, sizes.seqlen), *of_out_proj, *own)


def _backward_fake(dout, *arguments):
    shared, *given, _ = unpack(arguments, Shared, Direction, Backwards, KeptOfBoth)
    _, sizes = _directions(shared, *given)
    dxz = shared.xz.new_empty((2 * sizes.dim, sizes.batch, sizes.seqlen)).transpose(0, 1)
    tensors = *shared[1:], *given[0], *given[1]
    return Gradients(dxz, *(None if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors))


mamba_inner_both_backward_op = define(
    f"mamba_inner_both_backward(Tensor dout, {signature(Shared, Direction, Backwards, KeptOfBoth)}) "
    f"-> {returns(Gradients)}",
    _backward,
    _backward_fake,
)


class _MambaInnerBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *inputs, keep = arguments
        results = call_below_autograd(mamba_inner_both_op, *inputs, True)
        out, *kept = results
        ctx.save_for_backward(*inputs, *kept)
        ctx.set_materialize_grads(False)
        if not keep:
            return out, *(None for _ in kept)
        ctx.mark_non_differentiable(*kept)
        return results

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return no_gradients(Shared, Direction, Backwards, Wanted)
        with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
            grads = call_in_backward(mamba_inner_both_backward_op, dout, *ctx.saved_tensors)
        return *grads, *no_gradients(Wanted)


mamba_inner_both_op = define(
    f"mamba_inner_both({signature(Shared, Direction, Backwards, Wanted)}) -> {returns(Results)}",
    _forward,
    _forward_fake,
    autograd=_MambaInnerBoth,
)
