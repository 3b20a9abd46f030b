"""The scan of tensors like those of an earlier call: it skips the checks and the plan, whose results still hold.

A small call is bound by the host's time, of which this saves a part. While a tracer, compiler, profiler or dispatch
mode is active, calls go through the operators of forward.py and backward.py.
"""

import typing
from collections.abc import Callable

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import (
    apply,
    are_saved_as_given,
    likeness,
    make,
    no_gradients,
    use_deterministic_mode,
    watched,
    watched_in_backward,
)
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops._shared.plans import remember, table
from mamba_ssm.ops.selective_scan.arguments import (
    Inputs,
    Options,
    Sizes,
    allocate_out,
    check,
    fill,
    kernel_layout,
    segments_of,
    set_inputs,
    split_length,
)
from mamba_ssm.ops.selective_scan.backward import (
    INITIAL_STATE,
    Kept,
    Wanted,
    allocate,
    check_backward,
    gradients,
    of_inputs,
    prepare,
    set_gradients,
)


class Plan(typing.NamedTuple):
    """What forward calls that are alike share."""

    keep: bool  # for backward
    want_last_state: bool
    options: Options
    sizes: Sizes
    layouts: list[tuple[object, ...] | None]  # shape, strides and dtype of each input
    copies: bool  # kernels take copies of some inputs
    params: bytes  # abi.MambaSelectiveScan, with addresses of another call
    segments: int
    checkpoints: int  # floats
    like: Callable[[torch.Tensor], torch.Tensor]  # makes the gradient of an input
    backward: "dict[object, BackwardPlan]"  # by what the gradients are like that come in


class BackwardPlan(typing.NamedTuple):
    """What their backward calls share."""

    params: bytes  # abi.MambaSelectiveScanBackward, with addresses of another call
    workspace: int  # bytes


# By likeness; None for calls that have no plan.
_PLANS: dict[object, Plan | None] = table()
_UNKNOWN = object()
_NO_GRADIENTS = None, None  # of the plan and the addresses


def repeated_scan(inputs, options, want_last_state):
    """(out, last_state), or None where the operator has to be called. inputs, options: as tuples in the order of the
    records, the inputs in the dtypes that the operator takes. Refuses what the operator refuses.
    """
    if watched():
        return None
    keep = torch.is_grad_enabled()
    if keep and not are_saved_as_given():
        return None
    alike, addresses = likeness(inputs)
    if alike is None:
        return None
    if keep:
        keep = False
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                keep = True
                break
    key = keep, want_last_state, options, torch.get_num_threads(), alike
    plan = _PLANS.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = _plan(make(Inputs, inputs), make(Options, options), keep, want_last_state)
        remember(_PLANS, key, plan)
    if plan is None:
        return None
    if keep:
        return apply(_SelectiveScan, plan, addresses, *inputs)
    return _forward(plan, inputs, addresses)[:2]


def _plan(inputs, options, keep, want_last_state):
    """None where the operator runs no kernel, or is to say what is wrong."""
    try:
        sizes = check(inputs)
    except AttributeError:  # of what is no tensor
        return None
    if inputs.u.numel() == 0:
        return None
    layouts = [None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs]
    # torch.empty_like keeps an input's strides
    like = torch.empty_like if checks.all_contiguous(inputs) else empty_like
    taken = kernel_layout(inputs)
    copies = any(tensor is not given for tensor, given in zip(taken, inputs, strict=True))
    params = abi.MambaSelectiveScan()
    functions = place(params, taken.A)
    fill(params, sizes, taken, options, allocate_out(taken.u), None)
    segments = segments_of(functions, params)
    shared = options, sizes, layouts, copies, bytes(params), segments, sizes.checkpoints, like
    return Plan(keep, want_last_state, *shared, {})


def _taken(plan, inputs, addresses):
    """The inputs as the kernels take them, and their addresses."""
    inputs = make(Inputs, inputs)
    if plan.copies:
        inputs = kernel_layout(inputs)
        addresses = [pointer(tensor) for tensor in inputs]
    return inputs, addresses


def _forward(plan, inputs, addresses):
    """(out, last_state, checkpoints)."""
    inputs, addresses = _taken(plan, inputs, addresses)
    A = inputs.A
    params = abi.MambaSelectiveScan.from_buffer_copy(plan.params)
    functions = place(params, A)
    set_inputs(params, addresses)
    out, last_state, checkpoints = allocate_out(inputs.u), None, None
    params.out = out.data_ptr()
    if plan.want_last_state:
        last_state = A.new_empty(plan.sizes.state)
        params.last_state = last_state.data_ptr()
    if plan.keep:
        checkpoints = A.new_empty(plan.checkpoints)
        params.checkpoints = checkpoints.data_ptr()
    workspace = split_length(params, plan.segments, A)
    run(functions, "selective_scan_forward", params)
    del workspace  # held until here: the kernels have it now
    return out, last_state, checkpoints


class _SelectiveScan(torch.autograd.Function):
    """As the operator's, of calls for which there is a plan."""

    @staticmethod
    def forward(ctx, plan, addresses, *inputs):
        out, last_state, checkpoints = _forward(plan, inputs, addresses)
        ctx.save_for_backward(*inputs, checkpoints)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.addresses = plan, addresses
        return out, last_state

    @staticmethod
    def backward(ctx, dout, dlast_state):
        if dout is None and dlast_state is None:
            return *_NO_GRADIENTS, *no_gradients(Inputs)
        *inputs, checkpoints = ctx.saved_tensors
        plan = ctx.plan
        need_dinitial_state = inputs[INITIAL_STATE] is not None and ctx.needs_input_grad[2 + INITIAL_STATE]
        grads = None
        if dout is not None and not watched_in_backward() and _are_as_before(inputs, ctx.addresses, plan.layouts):
            taken, addresses = _taken(plan, inputs, ctx.addresses)
            wanted = make(Wanted, (need_dinitial_state, False))
            grads = _backward(plan, taken, addresses, checkpoints, dout, dlast_state, wanted)
        if grads is None:
            grads = gradients(dout, dlast_state, inputs, checkpoints, plan.options, need_dinitial_state)
        return *_NO_GRADIENTS, *grads


def _are_as_before(tensors, addresses, layouts):
    """Whether none has got other memory, another shape or dtype since (tensor.data = ...)."""
    for tensor, address, layout in zip(tensors, addresses, layouts, strict=True):
        if tensor is not None and (
            tensor.data_ptr() != address or (tensor.shape, tensor.stride(), tensor.dtype) != layout
        ):
            return False
    return True


def _backward(plan, inputs, addresses, checkpoints, dout, dlast_state, wanted):
    """The gradients in the order of Inputs, None if the operator has to be called."""
    alike, given = likeness((dout, dlast_state))
    if alike is None:
        return None
    if dout.stride(-1) != 1 or (dlast_state is not None and not dlast_state.is_contiguous()):
        dout, dlast_state = checks.unit_last_stride(dout), checks.contiguous(dlast_state)
        alike, given = likeness((dout, dlast_state))
    key = wanted, use_deterministic_mode(), torch.get_num_threads(), alike
    ready = plan.backward.get(key)
    if ready is None:
        check_backward(dout, dlast_state, inputs, make(Kept, (checkpoints,)))
    A, grads = inputs.A, allocate(inputs, plan.sizes, wanted, plan.like)
    if ready is None:
        arguments = plan.sizes, dout, dlast_state, inputs, checkpoints, plan.options, grads
        functions, params, workspace = prepare(*arguments)
        size = 0 if workspace is None else workspace.numel()
        remember(plan.backward, key, BackwardPlan(bytes(params), size))
    else:
        params = abi.MambaSelectiveScanBackward.from_buffer_copy(ready.params)
        functions = place(params, A)
        set_inputs(params, addresses)
        params.checkpoints = checkpoints.data_ptr()
        params.dout, params.dlast_state = given
        set_gradients(params, grads)
        workspace = A.new_empty(ready.workspace, dtype=torch.uint8) if ready.workspace else None
        params.workspace = pointer(workspace)
    run(functions, "selective_scan_backward", params)
    del workspace  # held until here: the kernels have it now
    return of_inputs(grads)
