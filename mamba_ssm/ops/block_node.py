"""A block as one autograd node: what every block has around its operator. With the norm and the residual's addition in
front of it, as one node too.

A training step of a small model is bound by the time that Python and autograd take, not by the kernels. One node a
layer, whose forward and backward are made by plans (see _torch/plans.py), takes the least of it.
"""

import typing
from collections.abc import Callable

import torch

from mamba_ssm._torch import (
    Again,
    apply,
    autocast_state,
    call_below_autograd,
    call_in_backward,
    is_compiling,
    no_autocast,
    planned,
    use_deterministic_mode,
)
from mamba_ssm.ops.norm import layer_norm_fn
from mamba_ssm.ops.norm.backward import add_norm_backward_op
from mamba_ssm.ops.norm.forward import add_norm_op


class Block(typing.NamedTuple):
    """What a block's node is made of: functions of its tensors, of which the first is its input (B, L, d_model), and of
    its settings, a tuple. need: of each tensor its dtype where its gradient is wanted, else None.
    """

    name: str
    # (*tensors, settings, need) -> (the output, the input or None, *others that are kept)
    forward: Callable[..., typing.Any]
    # (the output's gradient, *kept, settings, need) -> gradients, one a tensor
    backward: Callable[..., typing.Any]
    # (dtype, *tensors, *settings) -> the output, cast to dtype, which can be differentiated again
    by_operators: Callable[..., typing.Any]
    tensors: int  # how many


class Norm(typing.NamedTuple):
    """What a layer has in front of its block: the residual stream, and a norm's parameters and settings."""

    residual: torch.Tensor  # of the input's dtype, or float32
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    is_rms_norm: bool


class BlockNode:
    """A block's autograd nodes: of the block alone, and of a layer, with the norm and the residual in front."""

    def __init__(self, block: Block) -> None:
        self._alone, self._layer = _block_node(block), _layer_node(block)

    def __call__(self, inputs: typing.Any, settings: tuple[typing.Any, ...] = ()) -> torch.Tensor:
        """The block's output. For callers that wants_one_node has said yes to, as below."""
        return apply(self._alone, *inputs, *settings)

    def after_norm(
        self, norm: Norm, inputs: typing.Any, settings: tuple[typing.Any, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's output from its input's sum with the residual, normed; and the sum. Not under a compiler."""
        x, *others = inputs
        residual, weight, bias, *of_norm = norm
        return apply(self._layer, x, residual, weight, bias, *others, *of_norm, *settings)


def _block_node(block):
    """An autograd.Function of (*tensors, *settings)."""
    count = block.tensors
    name = f"{block.name}_node"
    planned_forward = planned(name, block.forward, (autocast_state,))
    planned_backward = planned(f"{name}_backward", block.backward, (use_deterministic_mode,))

    def forward(ctx, *arguments):
        tensors, ctx.settings = arguments[:count], arguments[count:]
        ctx.dtypes = _dtypes(tensors)
        out, *kept = planned_forward(*tensors, ctx.settings, _need(ctx))
        if not is_compiling():
            ctx.again = Again(tensors, kept[0])
        ctx.save_for_backward(*kept)
        return out

    def backward(ctx, dout):
        kept, need = ctx.saved_tensors, _need(ctx)
        if torch.is_grad_enabled() and not is_compiling():

            def again(*tensors):
                return block.by_operators(dout.dtype, *tensors, *ctx.settings)

            grads = ctx.again.gradients(again, need, kept[0], dout)
        else:
            with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
                grads = planned_backward(dout, *kept, ctx.settings, need)
        return *grads, *(None for _ in ctx.settings)

    return _function(name, forward, backward)


def _layer_node(block):
    """An autograd.Function of (x, residual, norm's weight and bias, the block's other *tensors, norm's eps and
    is_rms_norm, *settings), which gives the block's output and the sum of x and residual.
    """
    count = block.tensors + 3

    def normed_forward(*arguments):
        x, residual, weight, bias, *others, (eps, is_rms_norm, *settings), need = arguments
        normed, total, mean, rstd = call_below_autograd(
            add_norm_op, x, residual, weight, bias, eps, True, False, is_rms_norm, True
        )
        out, *kept = block.forward(normed, *others, tuple(settings), (normed.dtype, *need[4:]))
        return out, total, mean, rstd, *kept

    def normed_backward(dout, dtotal, total, weight, bias, mean, rstd, *arguments):
        *kept, (_, is_rms_norm, *settings), need = arguments
        dnormed, *grads = block.backward(dout, *kept, tuple(settings), (dout.dtype, *need[4:]))
        dx, dresidual, dweight, dbias = call_in_backward(
            add_norm_backward_op, dnormed, dtotal, total, weight, bias, mean, rstd, is_rms_norm
        )
        return dx, dresidual, dweight, dbias, *grads

    name = f"{block.name}_layer_node"
    planned_forward = planned(name, normed_forward, (autocast_state,))
    planned_backward = planned(f"{name}_backward", normed_backward, (use_deterministic_mode,))

    def forward(ctx, *arguments):
        tensors, ctx.settings = arguments[:count], arguments[count:]
        ctx.dtypes = _dtypes(tensors)
        out, total, mean, rstd, *kept = planned_forward(*tensors, ctx.settings, _need(ctx))
        ctx.again = Again((total, *tensors[2:]), total)
        ctx.save_for_backward(total, tensors[2], tensors[3], mean, rstd, *kept)
        ctx.set_materialize_grads(False)
        return out, total

    def backward(ctx, dout, dtotal):
        need, nothing = _need(ctx), (None,) * len(ctx.settings)
        if dout is None:  # the output was not used
            return dtotal, dtotal, *(None,) * (count - 2), *nothing
        if torch.is_grad_enabled():
            dtotal, *grads = _differentiable_gradients(ctx, block, dout, dtotal, need)
            return dtotal, dtotal, *grads, *nothing
        with no_autocast(dout):
            dx, dresidual, *grads = planned_backward(dout, dtotal, *ctx.saved_tensors, ctx.settings, need)
        return dx, dx if dresidual is None else dresidual, *grads, *nothing  # None: of x's dtype

    return _function(name, forward, backward)


def _dtypes(tensors):
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


def _need(ctx):
    """Of each tensor that forward was given its dtype where its gradient is wanted, else None."""
    return tuple([dtype if wanted else None for wanted, dtype in zip(ctx.needs_input_grad, ctx.dtypes, strict=False)])


def _function(name, forward, backward):
    """An autograd.Function that graphs and profilers show under this name."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _differentiable_gradients(ctx, block, dout, dtotal, need):
    """Those of the sum and of what follows the residual: the sum, which is an output of the node itself, leads to x."""
    eps, is_rms_norm, *settings = ctx.settings

    def again(total, weight, bias, *others):
        normed = layer_norm_fn(total, weight, bias, eps=eps, is_rms_norm=is_rms_norm).to(ctx.dtypes[0])
        return block.by_operators(dout.dtype, normed, *others, *settings)

    of_sum, *grads = ctx.again.gradients(again, (True, *need[2:]), ctx.saved_tensors[0], dout)
    return of_sum if dtotal is None else of_sum + dtotal, *grads
