"""Selective scan (Mamba-1): the public function and its forward operator on the native kernels.

h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t;  out_t = (C_t . h_t + D u_t) silu(z_t);
dt_t = softplus?(delta_t + delta_bias) (Mamba, arXiv 2312.00752, section 3.2). With reverse h_t comes from h_{t+1}.
Letters: B batch, D channels, L length, N dstate, G groups of B and C.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import (
    autocast_dtype,
    call,
    call_below_autograd,
    call_in_backward,
    define,
    make,
    no_gradients,
    reference,
    returns,
    signature,
    unpack,
)
from mamba_ssm.ops.selective_scan.arguments import (
    Inputs,
    Options,
    Results,
    allocate_out,
    check,
    check_fake,
    fill,
    kernel_layout,
    segments_of,
    split_length,
)
from mamba_ssm.ops.selective_scan.backward import INITIAL_STATE, of_inputs, selective_scan_backward_op
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    return_last_state: bool
    return_checkpoints: bool


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Selective scan along the last dimension, differentiable in every floating-point argument.

    Args:
        u, delta, z: (B, D, L) of one dtype: float32, float16 or bfloat16. z gates the output with silu(z).
            Under autocast delta, z and variable B and C are cast to u's dtype.
        A: (D, N) float32 (as every float32 argument, widened if it comes narrower). N is 1..256.
        B, C: (B, N, L) or (B, G, N, L) of u's dtype, where G divides D; or constant (D, N) float32.
        D: (D) float32, the skip connection. delta_bias: (D) float32, added to delta.
        delta_softplus: dt = softplus(delta + delta_bias).
        return_last_state: also return the state after the last step.
        initial_state: (B, D, N) float32, the state before the first step; zero if None.
        seq_idx: (B, L) int32; the state restarts from zero at each step whose value differs from the step before.
        reverse: scan from the last step to the first, so that a step sees itself and what lies behind it: the initial
            state then stands behind the last step, and the last state is the one at step 0. Nearly as fast as forwards.

    Returns:
        out (B, D, L) of u's dtype; with return_last_state (out, last_state), last_state (B, D, N) float32. Gradients
        flow into initial_state and out of last_state. States and arithmetic are float32. No argument has a unit.

    Raises:
        TypeError: a dtype is wrong, or A is complex. ValueError: a shape or a device is wrong.
        NativeError (a RuntimeError): the kernel library cannot be loaded or does not support this device or dtype.

    Same as upstream's mamba_ssm.ops.selective_scan_interface.selective_scan_fn, except that complex A needs
    plain_torch, and initial_state, seq_idx, reverse and the gradient of last_state are additions.
    """
    if reference.on and not reference.exporting:
        rest = delta_softplus, return_last_state, initial_state, seq_idx
        return selective_scan_ref(u, delta, A, B, C, D, z, delta_bias, *rest, reverse=reverse)
    try:  # written out: this is a good part of a small call
        if A.dtype != torch.float32:
            A = checks.widen(A)
        if B.dim() == 2:
            B = checks.widen(B)
        if C.dim() == 2:
            C = checks.widen(C)
        if D is not None and D.dtype != torch.float32:
            D = checks.widen(D)
        if delta_bias is not None and delta_bias.dtype != torch.float32:
            delta_bias = checks.widen(delta_bias)
        if initial_state is not None and initial_state.dtype != torch.float32:
            initial_state = checks.widen(initial_state)
        dtype = u.dtype
        one_dtype = delta.dtype == dtype and B.dtype == dtype and C.dtype == dtype and (z is None or z.dtype == dtype)
        if not one_dtype and autocast_dtype(u) is not None:  # which leaves some inputs wider: norms' outputs
            delta, z = checks.cast(delta, dtype), checks.cast(z, dtype)
            B, C = (matrix if matrix.dim() == 2 else checks.cast(matrix, dtype) for matrix in (B, C))
    except AttributeError:  # of what is no tensor; the operator names it
        pass
    inputs = u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx
    options = bool(delta_softplus), bool(return_last_state), False, bool(reverse)
    out, last_state, _ = call(selective_scan_op, *inputs, *options)
    return (out, last_state) if return_last_state else out


# ---- operator --------------------------------------------------------------------------------------------------------


def _allocate(u, sizes, wanted):
    """The operator's results, without values."""
    last_state = u.new_empty(sizes.state, dtype=torch.float32) if wanted.return_last_state else None
    checkpoints = u.new_empty((sizes.checkpoints,), dtype=torch.float32) if wanted.return_checkpoints else None
    return make(Results, (allocate_out(u), last_state, checkpoints))


def _forward(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes, inputs = check(inputs), kernel_layout(inputs)
    results = _allocate(inputs.u, sizes, wanted)
    if inputs.u.numel() == 0:
        if wanted.return_last_state:
            state, initial = results.last_state, inputs.initial_state
            state.zero_() if initial is None else state.copy_(initial)
        return results
    launch_forward(sizes, inputs, options, results)
    return results


def _forward_fake(*arguments):
    inputs, _, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs)
    check_fake("selective_scan", inputs)
    return _allocate(checks.unit_last_stride(inputs.u), sizes, wanted)


def launch_forward(sizes, inputs, options, results, carry=None, add=False):
    """Runs the kernels. inputs: in kernel layout; all but parameters and states, and results.out, may be Views.
    carry: as split_length takes it. add: to results.out, which holds what the other direction gave; with reverse alone.
    """
    params = abi.MambaSelectiveScan()
    functions = place(params, inputs.A)
    fill(params, sizes, options, inputs, results)
    params.add = add
    segments = segments_of(functions, params) if carry is None else None
    workspace = split_length(params, segments, inputs.A, carry)
    run(functions, "selective_scan_forward", params)
    del workspace  # held until here: the kernels have it now


_NO_GRADIENTS = no_gradients(Options, Wanted)


class _SelectiveScan(torch.autograd.Function):
    """Saves the inputs and a state every 64 steps; out and the states between are computed again in backward."""

    @staticmethod
    def forward(ctx, *arguments):
        *inputs, softplus, return_last_state, return_checkpoints, reverse = arguments
        options = softplus, return_last_state, True, reverse
        out, last_state, checkpoints = call_below_autograd(selective_scan_op, *inputs, *options)
        ctx.save_for_backward(*inputs, checkpoints)
        ctx.options = softplus, reverse
        ctx.set_materialize_grads(False)
        if not return_checkpoints:
            return out, last_state, None
        ctx.mark_non_differentiable(checkpoints)
        return out, last_state, checkpoints

    @staticmethod
    def backward(ctx, dout, dlast_state, _):
        if dout is None and dlast_state is None:
            return *no_gradients(Inputs), *_NO_GRADIENTS
        *inputs, checkpoints = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(inputs[0])
        softplus, reverse = ctx.options
        options = softplus, ctx.needs_input_grad[INITIAL_STATE], False, reverse
        grads = call_in_backward(selective_scan_backward_op, dout, dlast_state, *inputs, checkpoints, *options)
        return *of_inputs(grads), *_NO_GRADIENTS


selective_scan_op = define(
    f"selective_scan({signature(Inputs, Options, Wanted)}) -> {returns(Results)}",
    _forward,
    _forward_fake,
    autograd=_SelectiveScan,
    planned=(),
)
