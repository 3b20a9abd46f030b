"""The backward operator of Mamba-2's scan: gradients of every input but z, from the inputs alone.

States are computed again. The gate is not part of it: the autograd.Function in forward.py takes it off first.
"""

import typing

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.ssd.arguments import (
    Gradients,
    Incoming,
    Inputs,
    Options,
    Ungated,
    allocate_workspace,
    check,
    fill,
    kernel_layout,
    ungated,
    with_gate,
)

_NAME = "ssd_backward"


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    need_dinitial_states: bool


def of_inputs(grads, dz):
    """The operator's results and the gradient of z under the names of their inputs."""
    dx, ddt, dA, dB, dC, dD, *others = grads
    return make(Inputs, (dx, ddt, dA, dB, dC, dD, dz, *others, None))  # None: of seq_idx


def _check(dout, dfinal_states, inputs, options):
    sizes, x = check(inputs, options), inputs.x
    checks.check_same(_NAME, "dout", dout, x.shape, x, "x", "(B, L, H, P)")
    if dfinal_states is not None:
        checks.check_float32(_NAME, "dfinal_states", dfinal_states, sizes.states, x, "x", "(B, H, P, N)")
    return sizes


def _allocate(sizes, inputs, wanted):
    """The operator's outputs, without values."""
    grads = [None if tensor is None else empty_like(tensor) for tensor in ungated(inputs)[:7]]
    return make(Gradients, (*grads, inputs.A.new_empty(sizes.states) if wanted.need_dinitial_states else None))


def _backward(dout, dfinal_states, *arguments):
    ungated, options, wanted = unpack(arguments, Ungated, Options, Wanted)
    inputs = with_gate(ungated, None)
    sizes = _check(dout, dfinal_states, inputs, options)
    grads = _allocate(sizes, inputs, wanted)
    if inputs.x.numel() == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
        if wanted.need_dinitial_states and dfinal_states is not None:
            grads.dinitial_states.copy_(dfinal_states)
        return grads
    dout, inputs = checks.unit_last_stride(dout), kernel_layout(inputs, options.reverse)
    launch_backward(sizes, dout, checks.contiguous(dfinal_states), inputs, options, grads)
    return grads


def _backward_fake(dout, dfinal_states, *arguments):
    ungated, options, wanted = unpack(arguments, Ungated, Options, Wanted)
    inputs = with_gate(ungated, None)
    return _allocate(_check(dout, dfinal_states, inputs, options), inputs, wanted)


def launch_backward(sizes, dout, dfinal_states, inputs, options, grads):
    """Runs the kernels, which write grads. inputs: in kernel layout, z None. dout, x, dt, B, C and their gradients may
    be Views.
    """
    params = abi.MambaSsdBackward()
    functions = place(params, inputs.A)
    fill(params, sizes, options, inputs, make(Incoming, (dout, dfinal_states)), grads)
    workspace = allocate_workspace(functions["ssd_backward_workspace"], params.forward, inputs.A)
    run(functions, "ssd_backward", params)
    del workspace  # held until here: the kernels have it now


ssd_backward_op = define(
    f"ssd_backward(Tensor dout, Tensor? dfinal_states, {signature(Ungated, Options, Wanted)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
