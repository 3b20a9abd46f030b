"""The backward operator of the selective scan: gradients of every input from the saved states."""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import define
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops._shared.gradients import add_parts, empty_like, empty_parts
from mamba_ssm.ops.selective_scan.arguments import (
    allocate,
    check,
    check_fake,
    checkpoint_size,
    fill,
    kernel_layout,
    plan_of,
    split_length,
)

_NAME = "selective_scan_backward"


def _check_backward(dout, dlast_state, inputs, checkpoints):
    sizes = batch, dim, seqlen, dstate, _ = check(*inputs)
    u = inputs[0]
    checks.check_same(_NAME, "dout", dout, u.shape, u, "u", "(B, D, L)")
    if dlast_state is not None:
        shape = (batch, dim, dstate)
        checks.check_float32(_NAME, "dlast_state", dlast_state, shape, u, "u", "(B, D, N)")
    shape = (checkpoint_size(batch, dim, seqlen, dstate),)
    checks.check_float32(_NAME, "checkpoints", checkpoints, shape, u, "u", "(B * (L-1)//64 * D * N + 2,)")
    return sizes


def _backward(
    dout,
    dlast_state,
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    delta_bias,
    initial_state,
    seq_idx,
    checkpoints,
    delta_softplus,
    need_dinitial_state,
    recompute_out,
):
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx)
    sizes = batch, dim, _, dstate, _ = _check_backward(dout, dlast_state, inputs, checkpoints)
    tensors = kernel_layout(*inputs)
    out = allocate(tensors[0], sizes, False, False)[0] if recompute_out else None
    if u.numel() == 0:
        grads = _empty_grads(sizes, inputs, need_dinitial_state, zero=True)
        if need_dinitial_state and dlast_state is not None:
            grads[-1].copy_(dlast_state)
        return *grads, out
    dout = checks.unit_last_stride(dout)
    dlast_state = checks.contiguous(dlast_state)
    du, ddelta, dz = empty_like(u), empty_like(u), None if z is None else empty_like(u)
    dinitial_state = A.new_empty((batch, dim, dstate)) if need_dinitial_state else None
    into = du, ddelta, dz, dinitial_state, out
    dA, dB, dC, dD, ddelta_bias = launch_backward(sizes, dout, dlast_state, tensors, checkpoints, delta_softplus, into)
    return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, out


def launch_backward(sizes, dout, dlast_state, tensors, checkpoints, delta_softplus, into, dBC=None):
    """Runs the kernels; returns the gradients of A, B, C, D and delta_bias.

    tensors: u to seq_idx in kernel layout; into: du, ddelta, dz, dinitial_state and out, to be written; None where not
    wanted. dout, u, delta, z, du, ddelta, dz and out may be Views with last stride 1.
    dBC: (2, B, N, L) of any strides, which takes the gradients of B and C (B, N, L); these may then be Views too.
    """
    _, _, A, B, C, D, _, delta_bias, _, _ = tensors
    du, ddelta, dz, dinitial_state, out = into
    batch, _, seqlen, dstate, _ = sizes
    params = abi.MambaSelectiveScanBackward()
    functions = place(params, A)
    fill(params, sizes, tensors, delta_softplus, out, checkpoints)
    plan = plan_of(functions, params.forward, torch.are_deterministic_algorithms_enabled())
    params.slots = slots = plan.slots
    parts = batch * plan.backward_segments
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
        shape = batch, dstate, seqlen
        sums = A.new_empty((2, *shape) if slots == 1 else (2, slots, *shape))
        if plan.zeroed_sums:
            sums.zero_()
        dB, dC = sums.unbind()
    dD = None if D is None else empty_parts(D, parts)
    ddelta_bias = None if delta_bias is None else empty_parts(delta_bias, parts)

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
    params.dinitial_state = pointer(dinitial_state)
    run(functions, "selective_scan_backward", params)
    del workspace
    if dBC is None:
        dB, dC = add_parts(dB, B), add_parts(dC, C)
    else:
        dBC.copy_(sums if slots == 1 else sums.sum(1))
        dB = dC = None
    return add_parts(dA, A), dB, dC, add_parts(dD, D), add_parts(ddelta_bias, delta_bias)


def _empty_grads(sizes, inputs, need_dinitial_state, zero):
    """Gradients in the operator's order, without values (zero: of zeros)."""
    u, _, A, B, C, D, z, delta_bias, _, _ = inputs
    batch, dim, _, dstate, _ = sizes
    grads = [
        u.new_empty(u.shape),
        u.new_empty(u.shape),
        A.new_empty(A.shape),
        B.new_empty(B.shape),
        C.new_empty(C.shape),
        None if D is None else D.new_empty(D.shape),
        None if z is None else u.new_empty(u.shape),
        None if delta_bias is None else delta_bias.new_empty(delta_bias.shape),
        A.new_empty((batch, dim, dstate)) if need_dinitial_state else None,
    ]
    return [None if grad is None else grad.zero_() for grad in grads] if zero else grads


def _backward_fake(dout, dlast_state, *arguments):
    *inputs, checkpoints, _, need_dinitial_state, recompute_out = arguments
    sizes = _check_backward(dout, dlast_state, inputs, checkpoints)
    check_fake(_NAME, *inputs, checkpoints, dout, dlast_state)
    out = allocate(checks.unit_last_stride(inputs[0]), sizes, False, False)[0] if recompute_out else None
    return *_empty_grads(sizes, inputs, need_dinitial_state, zero=False), out


selective_scan_backward_op = define(
    "selective_scan_backward(Tensor dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
    "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor? initial_state, Tensor? seq_idx, Tensor checkpoints, "
    "bool delta_softplus, bool need_dinitial_state, bool recompute_out) -> (Tensor du, Tensor ddelta, Tensor dA, "
    "Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddelta_bias, Tensor dinitial_state, Tensor out)",
    _backward,
    _backward_fake,
)
