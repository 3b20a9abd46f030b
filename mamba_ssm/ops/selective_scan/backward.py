"""The backward operator of the selective scan: gradients of every input from the saved states."""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import (
    define,
    make,
    returns,
    signature,
    unpack,
    use_deterministic_mode,
)
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops._shared.spec import Arg
from mamba_ssm.ops.selective_scan.arguments import (
    Gradients,
    Incoming,
    Inputs,
    Options,
    allocate_out,
    check,
    check_fake,
    fill,
    kernel_layout,
    plan_of,
)

_NAME = "selective_scan_backward"
INITIAL_STATE = Inputs._fields.index("initial_state")


class Kept(typing.NamedTuple):
    """What forward has kept beside its inputs."""

    checkpoints: Annotated[torch.Tensor, Arg("float32", "S")]


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    need_dinitial_state: bool
    recompute_out: bool


def of_inputs(grads):
    """The gradients under the names of their inputs."""
    du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, _ = grads  # in the order of Inputs
    return make(Inputs, (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, None))


def check_backward(dout, dlast_state, inputs, kept):
    sizes, u = check(inputs), inputs.u
    checks.check_same(_NAME, "dout", dout, u.shape, u, "u", "(B, D, L)")
    if dlast_state is not None:
        checks.check_float32(_NAME, "dlast_state", dlast_state, sizes.state, u, "u", "(B, D, N)")
    letters = "(B * (L-1)//64 * D * N + 2,)"
    checks.check_float32(_NAME, "checkpoints", kept.checkpoints, (sizes.checkpoints,), u, "u", letters)
    return sizes


def _backward(dout, dlast_state, *arguments):
    inputs, kept, options, wanted = unpack(arguments, Inputs, Kept, Options, Wanted)
    sizes = check_backward(dout, dlast_state, inputs, kept)
    return run_backward(sizes, dout, dlast_state, inputs, kept, options, wanted)


def run_backward(sizes, dout, dlast_state, inputs, kept, options, wanted, carried=None):
    """The operator on arguments that were checked. carried: as for launch_backward."""
    inputs = kernel_layout(inputs)
    grads = allocate(inputs, sizes, wanted)
    if inputs.u.numel() == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
        if wanted.need_dinitial_state and dlast_state is not None:
            grads.dinitial_state.copy_(dlast_state)
        return grads
    dout, dlast_state = checks.unit_last_stride(dout), checks.contiguous(dlast_state)
    launch_backward(sizes, dout, dlast_state, inputs, kept.checkpoints, options, grads, carried)
    return grads


def _backward_fake(dout, dlast_state, *arguments):
    inputs, kept, _, wanted = unpack(arguments, Inputs, Kept, Options, Wanted)
    sizes = check_backward(dout, dlast_state, inputs, kept)
    check_fake(_NAME, inputs, kept)
    return allocate(inputs, sizes, wanted)


def allocate(inputs, sizes, wanted):
    """The operator's results, without values."""
    u, A, D, z, delta_bias = inputs.u, inputs.A, inputs.D, inputs.z, inputs.delta_bias
    grads = (
        empty_like(u),
        empty_like(u),
        empty_like(A),
        empty_like(inputs.B),
        empty_like(inputs.C),
        None if D is None else empty_like(D),
        None if z is None else empty_like(u),
        None if delta_bias is None else empty_like(delta_bias),
        A.new_empty(sizes.state) if wanted.need_dinitial_state else None,
        allocate_out(checks.unit_last_stride(u)) if wanted.recompute_out else None,
    )
    return make(Gradients, grads)


def launch_backward(sizes, dout, dlast_state, inputs, checkpoints, options, grads, carried=None, add=False):
    """Runs the kernels, which write grads.

    inputs: in kernel layout. dout, u, delta, B, C, z and their gradients and out may be Views with last stride 1.
    carried: the workspace, which holds what the segments pass back already (see carry.py). add: to grads.out and
    grads.dz, which hold what the other direction gave; with reverse alone.
    """
    params = abi.MambaSelectiveScanBackward()
    functions = place(params, inputs.A)
    fill(params, sizes, options, inputs, make(Kept, (checkpoints,)), make(Incoming, (dout, dlast_state)), grads)
    plan = plan_of(functions, params.forward, use_deterministic_mode())
    params.segments, params.slots = plan.backward_segments, plan.slots
    params.carried = carried is not None
    params.add = add
    if carried is None and plan.backward_workspace:
        carried = inputs.A.new_empty(plan.backward_workspace, dtype=torch.uint8)
    params.workspace = pointer(carried)
    run(functions, "selective_scan_backward", params)
    del carried  # held until here: the kernels have it now


selective_scan_backward_op = define(
    f"selective_scan_backward(Tensor dout, Tensor? dlast_state, {signature(Inputs, Kept, Options, Wanted)}) "
    f"-> {returns(Gradients)}",
    _backward,
    _backward_fake,
    planned=(use_deterministic_mode,),
)
