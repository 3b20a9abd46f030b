"""A block as one autograd node: what every block has around its operator. With the norm and the residual's addition in
front of it, as one node too, and several such layers in a row.

A training step of a small model is bound by the time that Python and autograd take, not by the kernels. One node for
several layers, whose forward and backward are made by plans (see _torch/plans.py), takes the least of it.
"""

import functools
import typing
from collections.abc import Callable, Sequence

import torch

from mamba_ssm._torch import (
    Again,
    apply,
    autocast_state,
    both_ways,
    call_below_autograd,
    call_in_backward,
    is_traced,
    no_autocast,
    planned,
    refuse_second_derivatives,
    run_operator,
    use_deterministic_mode,
)
from mamba_ssm.ops.norm import layer_norm_fn
from mamba_ssm.ops.norm.backward import add_norm_backward_op
from mamba_ssm.ops.norm.forward import add_norm_op

IN_A_ROW = 4  # layers of one node


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
    """What a layer has in front of its block, but for the residual stream: a norm's parameters and settings."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    is_rms_norm: bool


class Layer(typing.NamedTuple):
    """A layer as autograd nodes take it: its block's nodes, its norm, the block's tensors but for its input, and the
    block's settings.
    """

    node: "BlockNode"
    norm: Norm
    others: tuple[torch.Tensor | None, ...]
    settings: tuple[typing.Any, ...]


class BlockNode:
    """A block's autograd nodes: of the block alone, and of layers, with the norm and the residual in front."""

    def __init__(self, block: Block) -> None:
        self._alone = _block_node(block)
        self._layers = {count: _layers_node(block, count) for count in (1, IN_A_ROW)}
        self._compiled_layers = {count: _compiled_layers_node(block, count) for count in (1, IN_A_ROW)}

    def __call__(self, inputs: typing.Any, settings: tuple[typing.Any, ...] = ()) -> torch.Tensor:
        """The block's output. For callers that wants_one_node has said yes to, as below."""
        return apply(self._alone, *inputs, *settings)

    def of_layers(
        self, x: torch.Tensor, residual: torch.Tensor, layers: Sequence[Layer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's output, and the residual stream behind its addition. residual: of x's dtype, or float32.
        layers: one, or IN_A_ROW, of this node.
        """
        tensors = [tensor for _, norm, others, _ in layers for tensor in (norm.weight, norm.bias, *others)]
        settings = [(norm.eps, norm.is_rms_norm, *of_block) for _, norm, _, of_block in layers]
        if is_traced():
            return apply(self._compiled_layers[len(layers)], *_each_once([x, residual, *tensors]), *settings)
        out, total, *_ = apply(self._layers[len(layers)], x, residual, *tensors, *settings)
        return out, total


def _each_once(tensors):
    """The same tensors, views where one comes again: torch's compiler takes none twice for an autograd.Function."""
    found = []
    for tensor in tensors:
        again = tensor is not None and any(tensor is other for other in found)
        found.append(tensor.view_as(tensor) if again else tensor)
    return found


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
        if not is_traced():
            ctx.again = Again(tensors, kept[0])
        ctx.save_for_backward(*kept)
        return out

    def backward(ctx, dout):
        kept, need = ctx.saved_tensors, _need(ctx)
        if torch.is_grad_enabled() and not is_traced():

            def again(*tensors):
                return (block.by_operators(dout.dtype, *tensors, *ctx.settings),)

            grads = ctx.again.gradients(again, need, kept[0], (dout,))
        else:
            with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
                grads = planned_backward(dout, *kept, ctx.settings, need)
        return *grads, *(None for _ in ctx.settings)

    return _function(name, forward, backward)


def _layers_node(block, count):
    """An autograd.Function of (x, residual, of each of so many layers the norm's weight and bias and the block's other
    *tensors, of each layer the tuple of the norm's eps and is_rms_norm and the block's *settings). It gives the last
    one's output and the sum that is normed there; of several layers also the first sum, from which gradients are
    differentiated.
    """
    name = _name_of_layers(block, count)
    planned_forward = planned(name, functools.partial(_layers_forward, block, count), (autocast_state,))
    planned_backward = planned(
        f"{name}_backward", functools.partial(_layers_backward, block, count), (use_deterministic_mode,)
    )

    def forward(ctx, *arguments):
        tensors, ctx.settings = arguments[:-count], arguments[-count:]
        ctx.dtypes = _dtypes(tensors)
        out, total, first, *kept = planned_forward(*tensors, ctx.settings, _need(ctx))
        ctx.again = Again((first, *tensors[2:]), first)
        ctx.save_for_backward(first, *kept)
        ctx.out_dtype = out.dtype
        ctx.set_materialize_grads(False)
        return (out, total) if count == 1 else (out, total, first)

    def backward(ctx, dout, dtotal, dfirst=None):
        need, nothing = _need(ctx), (None,) * count
        if dout is None and (dtotal is None or count == 1):  # the output was not used, nor the sum of several layers
            dsum = dtotal if count == 1 else dfirst
            return dsum, dsum, *(None,) * len(ctx.dtypes[2:]), *nothing
        if dout is None:
            dout = torch.zeros_like(dtotal, dtype=ctx.out_dtype)
        if torch.is_grad_enabled():
            dsum, *grads = _differentiable_gradients(ctx, block, dout, dtotal, need)
            dx = dresidual = dsum if dfirst is None else dsum + dfirst
        else:
            with no_autocast(dout):
                dx, dresidual, *grads = planned_backward(dout, dtotal, *ctx.saved_tensors, ctx.settings, need)
            if dfirst is not None:
                dx, dresidual = dx + dfirst, dresidual + dfirst
        return dx, dresidual, *grads, *nothing

    return _function(name, forward, backward)


def _name_of_layers(block, count):
    return f"{block.name}_layer_node" if count == 1 else f"{block.name}_{count}_layers_node"


def _compiled_layers_node(block, count):
    """The same for programs that are compiled, in which forward and backward are an operator each."""
    name = _name_of_layers(block, count)

    def forward(ctx, *arguments):
        tensors, settings = arguments[:-count], arguments[-count:]
        ctx.dtypes = _dtypes(tensors)
        width = tensors[2].shape[0]  # of the first norm's weight: the sequences' sizes may be open
        layouts = [None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors[2:]]
        layouts = ((None, None, width), tensors[0].dtype), ((None, None, width), tensors[1].dtype), *layouts
        of_forward, ctx.of_backward = both_ways(name, tensors[0].device.type, layouts, (settings, _need(ctx)), 2)
        out, total, *kept = run_operator(name, tensors, of_forward)
        ctx.save_for_backward(*kept)
        return out, total

    def backward(ctx, dout, dtotal):
        refuse_second_derivatives(name)  # of a program that is not compiled after all, behind a graph break
        return *run_operator(f"{name}_backward", [dout, dtotal, *ctx.saved_tensors], ctx.of_backward), *(None,) * count

    return _function(name, forward, backward)


def _layers_forward(block, count, x, residual, *arguments):
    """The last layer's output and sum, and of each layer the sum, the norm's weight, bias, mean and rstd, and what its
    block keeps.
    """
    *tensors, settings, need = arguments
    kept = []
    of_layers = zip(_parts(tensors, count), settings, _parts(need[2:], count), strict=True)
    for (weight, bias, *others), (eps, is_rms_norm, *of_block), (_, _, *need_others) in of_layers:
        normed, residual, mean, rstd = call_below_autograd(
            add_norm_op, x, residual, weight, bias, eps, True, False, is_rms_norm, True
        )
        x, *of_layer = block.forward(normed, *others, tuple(of_block), (normed.dtype, *need_others))
        kept += residual, weight, bias, mean, rstd, *of_layer
    return x, residual, *kept


def _layers_backward(block, count, dout, dtotal, *arguments):
    """The gradients of x, residual and each layer's tensors."""
    *kept, settings, need = arguments
    grads = []
    of_layers = [*zip(_parts(kept, count), settings, _parts(need[2:], count), strict=True)]
    for of_norm_and_block, (_, is_rms_norm, *of_block), (_, _, *need_others) in reversed(of_layers):
        total, weight, bias, mean, rstd, *of_layer = of_norm_and_block
        dnormed, *dothers = block.backward(dout, *of_layer, tuple(of_block), (dout.dtype, *need_others))
        dout, dtotal, *dnorm = call_in_backward(
            add_norm_backward_op, dnormed, dtotal, total, weight, bias, mean, rstd, is_rms_norm
        )
        dtotal = dout if dtotal is None else dtotal  # None: of dout's dtype
        grads[:0] = *dnorm, *dothers
    return dout, dtotal, *grads


def _parts(sequence, count):
    """The sequence cut into so many of the same length."""
    size = len(sequence) // count
    return [sequence[begin : begin + size] for begin in range(0, len(sequence), size)]


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
    """Those of the first sum and of what follows the residual: the sum, which is an output of the node itself, leads to
    x.
    """

    def again(total, *tensors):
        out = None
        for (weight, bias, *others), (eps, is_rms_norm, *settings) in zip(
            _parts(tensors, len(ctx.settings)), ctx.settings, strict=True
        ):
            options = {"eps": eps, "is_rms_norm": is_rms_norm}
            if out is None:
                normed = layer_norm_fn(total, weight, bias, **options).to(ctx.dtypes[0])
            else:
                normed, total = layer_norm_fn(out, weight, bias, residual=total, prenorm=True, **options)
            out = block.by_operators(dout.dtype, normed, *others, *settings)
        return out, total

    return ctx.again.gradients(again, (True, *need[2:]), ctx.saved_tensors[0], (dout, dtotal))
