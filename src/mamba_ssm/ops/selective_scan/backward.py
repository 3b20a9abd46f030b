"""The backward operator of the selective scan: gradients of every input from the saved states."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import define, make, returns, signature, unpack, use_deterministic_mode
from mamba_ssm.ops._shared.gradients import add_parts, empty_like, empty_parts
from mamba_ssm.ops.selective_scan.arguments import (
    Inputs,
    Options,
    allocate_out,
    check,
    check_fake,
    fill,
    kernel_layout,
    plan_of,
    split_length,
)

_NAME = "selective_scan_backward"


class Kept(typing.NamedTuple):
    """What forward has kept beside its inputs."""

    checkpoints: torch.Tensor


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    need_dinitial_state: bool
    recompute_out: bool


class Gradients(typing.NamedTuple):
    """The operator's results, None for those of absent inputs; with recompute_out also forward's out."""

    du: torch.Tensor
    ddelta: torch.Tensor
    dA: torch.Tensor
    dB: torch.Tensor
    dC: torch.Tensor
    dD: torch.Tensor | None
    dz: torch.Tensor | None
    ddelta_bias: torch.Tensor | None
    dinitial_state: torch.Tensor | None
    out: torch.Tensor | None


def of_inputs(grads):
    """The gradients under the names of their inputs."""
    du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, _ = grads  # in the order of Inputs
    return make(Inputs, (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, None))


class Targets(typing.NamedTuple):
    """What the kernels write beside the gradients that are summed from parts; None where not wanted."""

    du: torch.Tensor
    ddelta: torch.Tensor
    dz: torch.Tensor | None
    dinitial_state: torch.Tensor | None
    out: torch.Tensor | None


class Sums(typing.NamedTuple):
    """The gradients that are summed from parts."""

    dA: torch.Tensor
    dB: torch.Tensor | None
    dC: torch.Tensor | None
    dD: torch.Tensor | None
    ddelta_bias: torch.Tensor | None


def _check(dout, dlast_state, inputs, kept):
    sizes, u = check(inputs), inputs.u
    checks.check_same(_NAME, "dout", dout, u.shape, u, "u", "(B, D, L)")
    if dlast_state is not None:
        checks.check_float32(_NAME, "dlast_state", dlast_state, sizes.state, u, "u", "(B, D, N)")
    letters = "(B * (L-1)//64 * D * N + 2,)"
    checks.check_float32(_NAME, "checkpoints", kept.checkpoints, (sizes.checkpoints,), u, "u", letters)
    return sizes


def _backward(dout, dlast_state, *arguments):
    inputs, kept, options, wanted = unpack(arguments, Inputs, Kept, Options, Wanted)
    sizes = _check(dout, dlast_state, inputs, kept)
    u, inputs = inputs.u, kernel_layout(inputs)
    if u.numel() == 0:
        grads = _allocate(inputs, sizes, wanted)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        if wanted.need_dinitial_state and dlast_state is not None:
            grads.dinitial_state.copy_(dlast_state)
        return grads
    dz = None if inputs.z is None else empty_like(u)
    dinitial_state = inputs.A.new_empty(sizes.state) if wanted.need_dinitial_state else None
    out = allocate_out(inputs.u) if wanted.recompute_out else None
    targets = make(Targets, (empty_like(u), empty_like(u), dz, dinitial_state, out))
    dout, dlast_state = checks.unit_last_stride(dout), checks.contiguous(dlast_state)
    sums = launch_backward(sizes, dout, dlast_state, inputs, kept.checkpoints, options, targets)
    dA, dB, dC, dD, ddelta_bias = sums
    du, ddelta, dz, dinitial_state, out = targets
    return make(Gradients, (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, out))


def _backward_fake(dout, dlast_state, *arguments):
    inputs, kept, _, wanted = unpack(arguments, Inputs, Kept, Options, Wanted)
    sizes = _check(dout, dlast_state, inputs, kept)
    check_fake(_NAME, inputs, kept)
    return _allocate(inputs, sizes, wanted)


def _allocate(inputs, sizes, wanted):
    """The operator's results, without values."""
    u, A, B, C, D, delta_bias = inputs.u, inputs.A, inputs.B, inputs.C, inputs.D, inputs.delta_bias
    return Gradients(
        u.new_empty(u.shape),
        u.new_empty(u.shape),
        A.new_empty(A.shape),
        B.new_empty(B.shape),
        C.new_empty(C.shape),
        None if D is None else D.new_empty(D.shape),
        None if inputs.z is None else u.new_empty(u.shape),
        None if delta_bias is None else delta_bias.new_empty(delta_bias.shape),
        A.new_empty(sizes.state) if wanted.need_dinitial_state else None,
        allocate_out(checks.unit_last_stride(u)) if wanted.recompute_out else None,
    )


def launch_backward(sizes, dout, dlast_state, inputs, checkpoints, options, targets, dBC=None):
    """Runs the kernels, which write targets; returns Sums.

    inputs: in kernel layout. dout, u, delta, z, du, ddelta, dz and out may be Views with last stride 1.
    dBC: (2, B, N, L) of any strides, which takes the gradients of B and C (B, N, L); these may then be Views too.
    """
    A, B, C, D, delta_bias = inputs.A, inputs.B, inputs.C, inputs.D, inputs.delta_bias
    params = abi.MambaSelectiveScanBackward()
    functions = place(params, A)
    fill(params, sizes, inputs, options, targets.out, checkpoints)
    plan = plan_of(functions, params.forward, use_deterministic_mode())
    params.slots = slots = plan.slots
    parts = sizes.batch * plan.backward_segments
    workspace = split_length(params, plan.backward_segments, A)

    dA = empty_parts(A, parts)
    if dBC is None:
        dB = empty_parts(B, parts if B.dim() == 2 else slots)
        dC = empty_parts(C, parts if C.dim() == 2 else slots)
        if plan.zeroed_sums:
            for matrix, gradient in ((B, dB), (C, dC)):
                if matrix.dim() > 2:
                    gradient.zero_()
    else:
        shape = sizes.batch, sizes.dstate, sizes.seqlen
        both = A.new_empty((2, *shape) if slots == 1 else (2, slots, *shape))
        if plan.zeroed_sums:
            both.zero_()
        dB, dC = both.unbind()
    dD = None if D is None else empty_parts(D, parts)
    ddelta_bias = None if delta_bias is None else empty_parts(delta_bias, parts)

    du, ddelta, dz = targets.du, targets.ddelta, targets.dz
    params.dout = dout.data_ptr()
    params.dout_batch_stride, params.dout_dim_stride, _ = dout.stride()
    params.dlast_state = pointer(dlast_state)
    params.du = du.data_ptr()
    params.du_batch_stride, params.du_dim_stride, _ = du.stride()
    params.ddelta = ddelta.data_ptr()
    params.ddelta_batch_stride, params.ddelta_dim_stride, _ = ddelta.stride()
    if dz is not None:
        params.dz = dz.data_ptr()
        params.dz_batch_stride, params.dz_dim_stride, _ = dz.stride()
    params.dA = dA.data_ptr()
    params.dB = dB.data_ptr()
    params.dC = dC.data_ptr()
    params.dD = pointer(dD)
    params.ddelta_bias = pointer(ddelta_bias)
    params.dinitial_state = pointer(targets.dinitial_state)
    run(functions, "selective_scan_backward", params)
    del workspace  # held until here: the kernels have it now
    if dBC is None:
        dB, dC = add_parts(dB, B), add_parts(dC, C)
    else:
        dBC.copy_(both if slots == 1 else both.sum(1))
        dB = dC = None
    return make(Sums, (add_parts(dA, A), dB, dC, add_parts(dD, D), add_parts(ddelta_bias, delta_bias)))


selective_scan_backward_op = define(
    f"selective_scan_backward(Tensor dout, Tensor? dlast_state, {signature(Inputs, Kept, Options, Wanted)}) "
    f"-> {returns(Gradients)}",
    _backward,
    _backward_fake,
)
