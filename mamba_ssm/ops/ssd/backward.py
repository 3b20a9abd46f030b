"""The backward operator of Mamba-2's scan: gradients of every input but z, from the inputs alone.

States are computed again. The gate is not part of it: the autograd.Function in forward.py takes it off first.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import define, make, returns, signature, unpack
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.ssd.arguments import (
    Inputs,
    Options,
    Ungated,
    allocate_workspace,
    check,
    fill,
    kernel_layout,
    of_steps,
    with_gate,
)

_NAME = "ssd_backward"


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    need_dinitial_states: bool


class Gradients(typing.NamedTuple):
    """The operator's results, None for those of absent inputs."""

    dx: torch.Tensor
    ddt: torch.Tensor
    dA: torch.Tensor
    dB: torch.Tensor
    dC: torch.Tensor
    dD: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dinitial_states: torch.Tensor | None


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
    return Gradients(
        empty_like(inputs.x),
        empty_like(inputs.dt),
        empty_like(inputs.A),
        empty_like(inputs.B),
        empty_like(inputs.C),
        None if inputs.D is None else empty_like(inputs.D),
        None if inputs.dt_bias is None else empty_like(inputs.dt_bias),
        inputs.A.new_empty(sizes.states) if wanted.need_dinitial_states else None,
    )


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
    dx, ddt, dB, dC, dout = (
        of_steps(tensor, sizes, options) for tensor in (grads.dx, grads.ddt, grads.dB, grads.dC, dout)
    )
    params = abi.MambaSsdBackward()
    functions = place(params, inputs.A)
    fill(params, sizes, inputs, options)
    workspace = allocate_workspace(functions["ssd_backward_workspace"], params.forward, inputs.A)
    params.dout = dout.data_ptr()
    params.dout_batch_stride, params.dout_len_stride, params.dout_head_stride, _ = dout.stride()
    params.dfinal_state = pointer(dfinal_states)
    params.dx = dx.data_ptr()
    params.dx_batch_stride, params.dx_len_stride, params.dx_head_stride, _ = dx.stride()
    params.ddt = ddt.data_ptr()
    params.ddt_batch_stride, params.ddt_len_stride, params.ddt_head_stride = ddt.stride()
    params.dA = grads.dA.data_ptr()
    params.dB = dB.data_ptr()
    params.dB_batch_stride, params.dB_len_stride, params.dB_group_stride, _ = dB.stride()
    params.dC = dC.data_ptr()
    params.dC_batch_stride, params.dC_len_stride, params.dC_group_stride, _ = dC.stride()
    params.dD = pointer(grads.dD)
    params.ddt_bias = pointer(grads.ddt_bias)
    params.dinitial_state = pointer(grads.dinitial_states)
    run(functions, "ssd_backward", params)
    del workspace  # held until here: the kernels have it now


ssd_backward_op = define(
    f"ssd_backward(Tensor dout, Tensor? dfinal_states, {signature(Ungated, Options, Wanted)}) -> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(),
)
