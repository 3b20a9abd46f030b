"""Selective scan (Mamba-1): the public function and its forward and backward operators on the native kernels.

h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t;  out_t = (C_t . h_t + D u_t) silu(z_t);
dt_t = softplus?(delta_t + delta_bias) (Mamba, arXiv 2312.00752, section 3.2).
Letters: B batch, D channels, L length, N dstate, G groups of B and C.
"""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, pointer, run
from mamba_ssm.ops import _checks as checks
from mamba_ssm.ops._library import below_autograd, call, call_in_backward, define

_NAME = "selective_scan"


def selective_scan_fn(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    initial_state=None,
    seq_idx=None,
):
    """Selective scan along the last dimension, differentiable once in every floating-point argument.

    Args:
        u, delta, z: (B, D, L) of one dtype: float32, float16 or bfloat16. z gates the output with silu(z).
        A: (D, N) float32 (as every float32 argument, widened if it comes narrower). N is 1..256.
        B, C: (B, N, L) or (B, G, N, L) of u's dtype, where G divides D; or constant (D, N) float32.
        D: (D) float32, the skip connection. delta_bias: (D) float32, added to delta.
        delta_softplus: dt = softplus(delta + delta_bias).
        return_last_state: also return the state after the last step.
        initial_state: (B, D, N) float32, the state before the first step; zero if None.
        seq_idx: (B, L) int32; the state restarts from zero at each step whose value differs from the step before.

    Returns:
        out (B, D, L) of u's dtype; with return_last_state (out, last_state), last_state (B, D, N) float32. Gradients
        flow into initial_state and out of last_state. States and arithmetic are float32. No argument has a unit.

    Raises:
        TypeError: a dtype is wrong, or A is complex. ValueError: a shape or a device is wrong.
        NativeError (a RuntimeError): the kernel library cannot be loaded or does not support this device or dtype.

    Same as upstream's mamba_ssm.ops.selective_scan_interface.selective_scan_fn, except that complex A is not supported,
    and initial_state, seq_idx and the gradient of last_state are additions.
    """
    if A.dtype != torch.float32:
        A = checks.widen(A)
    B = _with_groups(B)
    C = _with_groups(C)
    if D is not None and D.dtype != torch.float32:
        D = checks.widen(D)
    if delta_bias is not None and delta_bias.dtype != torch.float32:
        delta_bias = checks.widen(delta_bias)
    if initial_state is not None and initial_state.dtype != torch.float32:
        initial_state = checks.widen(initial_state)
    options = bool(delta_softplus), bool(return_last_state), False
    out, last_state, _ = call(selective_scan_op, u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, *options)
    return (out, last_state) if return_last_state else out


def _with_groups(matrix):
    """(B, N, L) -> (B, 1, N, L); constant matrices are widened."""
    dims = matrix.dim()
    if dims == 3:
        return matrix.unsqueeze(1)
    return checks.widen(matrix) if dims == 2 else matrix


# ---- checks and parameters -------------------------------------------------------------------------------------------


def _checkpoint_size(batch, dim, seqlen, dstate):
    """Floats to allocate for the states that the forward scan stores for the backward scan: (B, (L-1)//64, D, N), flat.

    Two more than that, of no value, since compilers specialise graphs on sizes of 0 and 1, that is on short sequences.
    """
    count = (seqlen - 1) // abi.SCAN_CHECKPOINT if seqlen > 0 else 0
    return batch * count * dim * dstate + 2


def _check(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx):
    """Raises on any argument that the kernels do not take; returns (batch, dim, seqlen, dstate, ngroups)."""
    checks.check_dims(_NAME, "u", u, 3, "(B, D, L)")
    checks.check_activation_dtype(_NAME, "u", u)
    batch, dim, seqlen = shape = u.shape
    checks.check_same(_NAME, "delta", delta, shape, u, "u", "(B, D, L)")
    checks.no_complex(_NAME, "A", A)
    checks.check_dims(_NAME, "A", A, 2, "(D, N)")
    dstate = A.shape[1]
    checks.check_float32(_NAME, "A", A, (dim, dstate), u, "u", "(D, N)")
    checks.check_dstate(_NAME, dstate, abi.MAX_DSTATE)
    ngroups = 1
    if B.dim() == 4:
        ngroups = B.shape[1]
    elif C.dim() == 4:
        ngroups = C.shape[1]
    checks.check_groups(_NAME, "dim (channels of u)", dim, ngroups)
    for name, matrix in (("B", B), ("C", C)):
        if matrix.dim() == 4:
            letters = "(B, G, N, L)"
            checks.check_same(_NAME, name, matrix, (batch, ngroups, dstate, seqlen), u, "u", letters)
        elif matrix.dim() == 2:
            checks.check_float32(_NAME, name, matrix, (dim, dstate), u, "u", "(D, N) as a constant")
        else:
            raise ValueError(
                f"{_NAME}: {name} must be (B, G, N, L), (B, N, L), or constant (D, N), got shape {tuple(matrix.shape)}"
            )
    if z is not None:
        checks.check_same(_NAME, "z", z, shape, u, "u", "(B, D, L)")
    if D is not None:
        checks.check_float32(_NAME, "D", D, (dim,), u, "u", "(D,)")
    if delta_bias is not None:
        checks.check_float32(_NAME, "delta_bias", delta_bias, (dim,), u, "u", "(D,)")
    if initial_state is not None:
        checks.check_float32(_NAME, "initial_state", initial_state, (batch, dim, dstate), u, "u", "(B, D, N)")
    if seq_idx is not None:
        checks.check_int32(_NAME, "seq_idx", seq_idx, (batch, seqlen), u, "u", "(B, L)")
    return batch, dim, seqlen, dstate, ngroups


def _kernel_layout(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx):
    """The same tensors in the layout that the kernels take: stride 1 along the length, parameters contiguous."""
    return (
        checks.unit_last_stride(u),
        checks.unit_last_stride(delta),
        A.contiguous(),
        checks.unit_last_stride(B) if B.dim() == 4 else B.contiguous(),
        checks.unit_last_stride(C) if C.dim() == 4 else C.contiguous(),
        checks.contiguous(D),
        checks.unit_last_stride(z),
        checks.contiguous(delta_bias),
        checks.contiguous(initial_state),
        checks.contiguous(seq_idx),
    )


def _fill(params, sizes, tensors, delta_softplus, out, checkpoints):
    """Sets the fields that forward and backward share, from tensors in kernel layout."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx = tensors
    params.batch, params.dim, params.seqlen, params.dstate, params.ngroups = sizes
    params.dtype = DTYPE_CODES[u.dtype]
    params.delta_softplus = delta_softplus
    params.u = u.data_ptr()
    params.u_batch_stride, params.u_dim_stride, _ = u.stride()
    params.delta = delta.data_ptr()
    params.delta_batch_stride, params.delta_dim_stride, _ = delta.stride()
    params.A = A.data_ptr()
    params.B = B.data_ptr()
    if B.dim() == 4:
        params.variable_B = 1
        params.B_batch_stride, params.B_group_stride, params.B_dstate_stride, _ = B.stride()
    params.C = C.data_ptr()
    if C.dim() == 4:
        params.variable_C = 1
        params.C_batch_stride, params.C_group_stride, params.C_dstate_stride, _ = C.stride()
    if D is not None:
        params.D = D.data_ptr()
    if z is not None:
        params.z = z.data_ptr()
        params.z_batch_stride, params.z_dim_stride, _ = z.stride()
    if delta_bias is not None:
        params.delta_bias = delta_bias.data_ptr()
    if initial_state is not None:
        params.initial_state = initial_state.data_ptr()
    if seq_idx is not None:
        params.seq_idx = seq_idx.data_ptr()
    if out is not None:
        params.out = out.data_ptr()
        params.out_batch_stride, params.out_dim_stride, _ = out.stride()
    if checkpoints is not None:
        params.checkpoints = checkpoints.data_ptr()


def _plan(functions, params, deterministic):
    """How the library wants to run this problem."""
    plan = abi.MambaSelectiveScanPlan()
    run(functions, "selective_scan_plan", params, deterministic, plan)
    return plan


def _split_length(params, segments, A):
    """Sets how many parts the length is split into; returns the memory in which these pass on their states."""
    params.segments = segments
    if segments == 1:
        return None
    workspace = A.new_empty((segments, 2, params.batch, params.dim, params.dstate))
    params.workspace = workspace.data_ptr()
    return workspace


# ---- forward operator ------------------------------------------------------------------------------------------------


def _allocate(u, sizes, return_last_state, return_checkpoints):
    batch, dim, seqlen, dstate, _ = sizes
    out = torch.empty_like(u)
    if out.stride(-1) != 1 and seqlen > 1:  # u was neither dense nor contiguous
        out = u.new_empty(u.shape)
    last_state = checkpoints = None
    if return_last_state:
        last_state = u.new_empty((batch, dim, dstate), dtype=torch.float32)
    if return_checkpoints:
        checkpoints = u.new_empty((_checkpoint_size(batch, dim, seqlen, dstate),), dtype=torch.float32)
    return out, last_state, checkpoints


def _forward(
    u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, delta_softplus, return_last_state, return_checkpoints
):
    sizes = _check(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx)
    tensors = _kernel_layout(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx)
    out, last_state, checkpoints = _allocate(tensors[0], sizes, return_last_state, return_checkpoints)
    if u.numel() == 0:
        if return_last_state:
            last_state.zero_() if initial_state is None else last_state.copy_(initial_state)
        return out, last_state, checkpoints
    params = abi.MambaSelectiveScan()
    functions = place(params, u)
    _fill(params, sizes, tensors, delta_softplus, out, checkpoints)
    if return_last_state:
        params.last_state = last_state.data_ptr()
    plan = _plan(functions, params, False)
    workspace = _split_length(params, plan.forward_segments, A)
    run(functions, "selective_scan_forward", params)
    del workspace  # held until here: the kernels have it now
    return out, last_state, checkpoints


def _forward_fake(
    u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, delta_softplus, return_last_state, return_checkpoints
):
    sizes = _check(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx)
    return _allocate(checks.unit_last_stride(u), sizes, return_last_state, return_checkpoints)


class _SelectiveScan(torch.autograd.Function):
    """Saves the inputs and a state every 64 steps; out and the states between are computed again in backward."""

    @staticmethod
    def forward(
        ctx,
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
        delta_softplus,
        return_last_state,
        return_checkpoints,
    ):
        inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx)
        with below_autograd():
            out, last_state, checkpoints = selective_scan_op(*inputs, delta_softplus, return_last_state, True)
        ctx.save_for_backward(*inputs, checkpoints)
        ctx.delta_softplus = delta_softplus
        ctx.set_materialize_grads(False)
        if not return_checkpoints:
            return out, last_state, None
        ctx.mark_non_differentiable(checkpoints)
        return out, last_state, checkpoints

    @staticmethod
    def backward(ctx, dout, dlast_state, _):
        *inputs, checkpoints = ctx.saved_tensors
        if dout is None and dlast_state is None:
            return (None,) * 13
        if dout is None:
            dout = torch.zeros_like(inputs[0])
        options = ctx.delta_softplus, ctx.needs_input_grad[8], False
        du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, _ = call_in_backward(
            selective_scan_backward_op, dout, dlast_state, *inputs, checkpoints, *options
        )
        return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, None, None, None, None


selective_scan_op = define(
    "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
    "Tensor? initial_state, Tensor? seq_idx, bool delta_softplus, bool return_last_state, bool return_checkpoints) "
    "-> (Tensor out, Tensor last_state, Tensor checkpoints)",
    _forward,
    _forward_fake,
    autograd=_SelectiveScan,
)


# ---- backward operator -----------------------------------------------------------------------------------------------


def _check_backward(dout, dlast_state, inputs, checkpoints):
    sizes = batch, dim, seqlen, dstate, _ = _check(*inputs)
    u = inputs[0]
    checks.check_same(_NAME + "_backward", "dout", dout, u.shape, u, "u", "(B, D, L)")
    if dlast_state is not None:
        shape = (batch, dim, dstate)
        checks.check_float32(_NAME + "_backward", "dlast_state", dlast_state, shape, u, "u", "(B, D, N)")
    shape = (_checkpoint_size(batch, dim, seqlen, dstate),)
    checks.check_float32(_NAME + "_backward", "checkpoints", checkpoints, shape, u, "u", "(B * (L-1)//64 * D * N + 2,)")
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
    sizes = batch, dim, seqlen, dstate, ngroups = _check_backward(dout, dlast_state, inputs, checkpoints)
    tensors = _kernel_layout(*inputs)
    out = _allocate(tensors[0], sizes, False, False)[0] if recompute_out else None
    if u.numel() == 0:
        grads = _empty_grads(sizes, inputs, need_dinitial_state, zero=True)
        if need_dinitial_state and dlast_state is not None:
            grads[-1].copy_(dlast_state)
        return *grads, out
    dout = checks.unit_last_stride(dout)
    dlast_state = checks.contiguous(dlast_state)

    params = abi.MambaSelectiveScanBackward()
    functions = place(params, u)
    _fill(params, sizes, tensors, delta_softplus, out, checkpoints)
    plan = _plan(functions, params.forward, torch.are_deterministic_algorithms_enabled())
    params.slots = slots = plan.slots
    parts = batch * plan.backward_segments
    workspace = _split_length(params, plan.backward_segments, A)

    du = u.new_empty(u.shape)
    ddelta = u.new_empty(u.shape)
    dz = None if z is None else u.new_empty(u.shape)
    # Parts to add up come in front; a single part is the gradient itself.
    per_state = (parts, dim, dstate) if parts > 1 else (dim, dstate)
    per_channel = (parts, dim) if parts > 1 else (dim,)
    per_step = (slots, batch, ngroups, dstate, seqlen) if slots > 1 else (batch, ngroups, dstate, seqlen)
    dA = A.new_empty(per_state)
    dB = A.new_zeros(per_step) if B.dim() == 4 else A.new_empty(per_state)
    dC = A.new_zeros(per_step) if C.dim() == 4 else A.new_empty(per_state)
    dD = None if D is None else A.new_empty(per_channel)
    ddelta_bias = None if delta_bias is None else A.new_empty(per_channel)
    dinitial_state = A.new_empty((batch, dim, dstate)) if need_dinitial_state else None

    params.dout = dout.data_ptr()
    params.dout_batch_stride, params.dout_dim_stride, _ = dout.stride()
    params.dlast_state = pointer(dlast_state)
    params.du = du.data_ptr()
    params.ddelta = ddelta.data_ptr()
    params.dz = pointer(dz)
    params.dA = dA.data_ptr()
    params.dB = dB.data_ptr()
    params.dC = dC.data_ptr()
    params.dD = pointer(dD)
    params.ddelta_bias = pointer(ddelta_bias)
    params.dinitial_state = pointer(dinitial_state)
    run(functions, "selective_scan_backward", params)
    del workspace
    return (
        du,
        ddelta,
        _add_parts(dA, A),
        _add_parts(dB, B),
        _add_parts(dC, C),
        _add_parts(dD, D),
        dz,
        _add_parts(ddelta_bias, delta_bias),
        dinitial_state,
        out,
    )


def _add_parts(parts, like):
    """The gradient of like from its float32 parts."""
    if parts is None:
        return None
    if parts.dim() > like.dim():
        parts = parts.sum(0)
    return parts if like.dtype == torch.float32 else parts.to(like.dtype)


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
    out = _allocate(checks.unit_last_stride(inputs[0]), sizes, False, False)[0] if recompute_out else None
    return *_empty_grads(sizes, inputs, need_dinitial_state, zero=False), out


selective_scan_backward_op = define(
    "selective_scan_backward(Tensor dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
    "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor? initial_state, Tensor? seq_idx, Tensor checkpoints, "
    "bool delta_softplus, bool need_dinitial_state, bool recompute_out) -> (Tensor du, Tensor ddelta, Tensor dA, "
    "Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddelta_bias, Tensor dinitial_state, Tensor out)",
    _backward,
    _backward_fake,
)
