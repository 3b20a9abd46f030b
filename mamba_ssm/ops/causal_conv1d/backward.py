"""The backward operator of the causal convolution: gradients of x, weight, bias and initial_states."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.causal_conv1d.arguments import (
    Gradients,
    Incoming,
    Inputs,
    Options,
    check,
    fill,
    kernel_layout,
    unit_stride,
)

_NAME = "causal_conv1d_backward"


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    need_dinitial_states: bool


def _check(dout, dfinal_states, inputs):
    sizes, x = check(inputs), inputs.x
    checks.check_same(_NAME, "dout", dout, x.shape, x, "x", "(B, D, L)")
    if dfinal_states is not None:
        checks.check_same(_NAME, "dfinal_states", dfinal_states, sizes.states, x, "x", "(B, D, W-1)")
    return sizes


def _allocate(sizes, inputs, need_dinitial_states):
    """The operator's outputs, without values."""
    x, bias = inputs.x, inputs.bias
    return Gradients(
        unit_stride(torch.empty_like(unit_stride(x))),
        empty_like(inputs.weight),
        None if bias is None else empty_like(bias),
        x.new_empty(sizes.states) if need_dinitial_states else None,
    )


def _backward(dout, dfinal_states, *arguments):
    inputs, wanted, options = unpack(arguments, Inputs, Wanted, Options)
    sizes, need_dinitial_states = _check(dout, dfinal_states, inputs), wanted.need_dinitial_states
    if dout.numel() == 0:
        grads = _allocate(sizes, inputs, need_dinitial_states)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        if need_dinitial_states and dfinal_states is not None:
            grads.dinitial_states.copy_(dfinal_states)
        return grads
    inputs, dout = kernel_layout(inputs, options.reverse), unit_stride(dout)
    dx = unit_stride(torch.empty_like(inputs.x))
    dinitial_states = dx.new_empty(sizes.states) if need_dinitial_states else None
    dweight, dbias = launch_backward(sizes, dout, dfinal_states, inputs, options, dx, dinitial_states)
    return Gradients(dx, dweight, dbias, dinitial_states)


def _backward_fake(dout, dfinal_states, *arguments):
    inputs, wanted, _ = unpack(arguments, Inputs, Wanted, Options)
    return _allocate(_check(dout, dfinal_states, inputs), inputs, wanted.need_dinitial_states)


def launch_backward(sizes, dout, dfinal_states, inputs, options, dx, dinitial_states, add=False):
    """Runs the kernels, which write dx (add: add to it) and dinitial_states (None: not wanted); returns dweight and
    dbias.

    inputs: in kernel layout. dout, x and dx may be Views (B, D, L), length or channels with stride 1.
    """
    weight, bias = inputs.weight, inputs.bias
    if dfinal_states is not None:
        dfinal_states = dfinal_states.flip(2) if options.reverse else dfinal_states.contiguous()
    dweight, dbias = empty_like(weight), None if bias is None else empty_like(bias)
    params = abi.MambaCausalConv1dBackward()
    functions = place(params, weight)
    grads = make(Gradients, (dx, dweight, dbias, dinitial_states))
    fill(params, sizes, options, inputs, make(Incoming, (dout, dfinal_states)), grads)
    size = functions["causal_conv1d_backward_workspace"](params.forward)
    workspace = weight.new_empty(size, dtype=torch.uint8) if size else None
    params.workspace = pointer(workspace)
    params.add = add
    run(functions, "causal_conv1d_backward", params)
    if options.reverse and dinitial_states is not None:
        dinitial_states.copy_(dinitial_states.flip(2))
    return dweight, dbias  # the kernels have the workspace now


causal_conv1d_backward_op = define(
    f"causal_conv1d_backward(Tensor dout, Tensor? dfinal_states, {signature(Inputs, Wanted, Options)}) "
    f"-> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
