"""Mamba-2's scan (state space duality): the public function and its operators on the native kernels.

h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  out_t = (h_t C_t + D x_t) silu(z_t);
dt_t = clamp(softplus?(dt_t + dt_bias), dt_limit) (Mamba-2, arXiv 2405.21060, section 6). With reverse h_t comes from
h_{t+1}.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
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
    flat,
    make,
    no_gradients,
    reference,
    signature,
    unpack,
    values_at_hand,
)
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.ssd.arguments import (
    NAME,
    Inputs,
    Options,
    Results,
    Ungated,
    allocate_workspace,
    check,
    check_options,
    fill,
    kernel_layout,
    with_gate,
)
from mamba_ssm.ops.ssd.backward import Wanted as WantedGradients
from mamba_ssm.ops.ssd.backward import of_inputs, ssd_backward_op
from mamba_ssm.ops.ssd.reference import ssd_by_reference
from mamba_ssm.ops.ssd.varlen import VarlenInputs, check_cu_seqlens, ssd_varlen_states_op


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    return_final_states: bool


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Mamba-2's scan along the length, differentiable in every floating-point argument.

    Args:
        x, z: (B, L, H, P) of one dtype: float32, float16 or bfloat16. z gates the output with silu(z). P is 1..256.
        dt: (B, L, H) float32, float16 or bfloat16, the same as x's or another.
        A: (H) float32 (as every float32 argument, widened if it comes narrower).
        B, C: (B, L, G, N) of x's dtype, where G divides H: H / G neighbouring heads share a group. N is 1..256. Under
            autocast B, C and z are cast to x's dtype.
        chunk_size: a positive integer, upstream's tile size. It has no effect: the kernels choose their own.
        D: (H) or (H, P) float32, the skip connection. dt_bias: (H) float32, added to dt.
        initial_states: (B, H, P, N) float32, the states before the first step; zero if None.
        seq_idx: (B, L) int32; the states restart from zero at each step whose value differs from the step before. The
            first step goes on from initial_states whatever its value is: it may be a piece of longer rows. (Upstream
            drops them unless it is 0.)
        cu_seqlens: (sequences + 1) int32: 0, where the other sequences packed in the one row of a batch of 1 begin, and
            the end of the last. Without seq_idx the states restart at these steps; the first sequence starts from
            initial_states. That the values rise from 0 is checked on the CPU alone.
        dt_softplus: dt = softplus(dt + dt_bias). dt_limit: (smallest, largest) value of dt, which is then clamped.
        return_final_states: also return the states after the last step.
        return_varlen_states: also return the states after each sequence of cu_seqlens. They carry no gradient.
        state_dtype: dtype of the returned states, float32 if None; they are computed in float32.
        reverse: scan from the last step to the first, so that a step sees itself and what lies behind it: the initial
            states then stand behind the last step, and the final states are those at step 0. As fast as forwards. Not
            with return_varlen_states.

    Returns:
        out (B, L, H, P) of x's dtype, or a tuple of out, with return_final_states final_states (B, H, P, N), and with
        return_varlen_states varlen_states (sequences, H, P, N). Gradients flow into initial_states and out of
        final_states. Arithmetic is float32. No argument has a unit.
        A NaN or infinity of an input stays in its row's results and, on the CPU, in its packed sequence and behind its
        step. On CUDA it may reach all of its tile of up to 64 steps, earlier ones and neighbour sequences too: tensor
        cores multiply masked zeros.

    Raises:
        TypeError: a dtype is wrong, or A is complex. ValueError: a shape, a device or a value is wrong.
        NativeError (a RuntimeError): the kernel library cannot be loaded or does not support this device or dtype.

    Only inputs are kept for backward, which computes the states again (and with z the output without it).
    Same as upstream's mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined; that cu_seqlens restarts the states
    without seq_idx, and reverse, are additions.
    """
    dt_min, dt_max = check_options(NAME, chunk_size, dt_limit, state_dtype)
    A, D, dt_bias, initial_states = (
        checks.widen(A),
        checks.widen(D),
        checks.widen(dt_bias),
        checks.widen(initial_states),
    )
    if isinstance(x, torch.Tensor) and autocast_dtype(x) is not None:  # which leaves some inputs wider: norms' outputs
        B, C, z = (checks.cast(tensor, x.dtype) for tensor in (B, C, z))
    if cu_seqlens is not None:
        check_cu_seqlens(x, cu_seqlens)
        if values_at_hand(cu_seqlens):
            checks.check_bounds(NAME, cu_seqlens.tolist(), x.shape[1])
        if seq_idx is None:
            steps = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
            seq_idx = torch.bucketize(steps, cu_seqlens[1:], right=True, out_int32=True)[None]
    elif return_varlen_states:
        raise ValueError(f"{NAME}: return_varlen_states needs cu_seqlens, got None")
    if reverse and return_varlen_states:
        raise ValueError(
            f"{NAME}: return_varlen_states is for scans forwards in time, got reverse=True: ask for final states of "
            "one sequence after the other"
        )
    if reference.on and not reference.exporting:
        given = D, z, dt_bias, dt_softplus, initial_states, seq_idx, (dt_min, dt_max)
        results = ssd_by_reference(x, dt, A, B, C, *given, cu_seqlens if return_varlen_states else None, reverse)
        out, final_states, *varlen = results if state_dtype is None else (results[0], *_to(results[1:], state_dtype))
        states = ([final_states] if return_final_states else []) + varlen
        return (out, *states) if states else out
    options = bool(dt_softplus), dt_min, dt_max
    wanted = bool(return_final_states), bool(reverse)
    out, final_states = call(ssd_op, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, *options, *wanted)
    if not return_final_states and not return_varlen_states:
        return out
    results = [out]
    if return_final_states:
        results.append(final_states)
    if return_varlen_states and cu_seqlens is not None:  # without them it was refused
        packed = VarlenInputs(x, dt, A, B, C, dt_bias, initial_states, cu_seqlens)
        with torch.no_grad():
            results.append(call(ssd_varlen_states_op, *packed, *options))
    if state_dtype is not None:
        results[1:] = [states.to(state_dtype) for states in results[1:]]
    return tuple(results)


def _to(tensors, dtype):
    return [tensor.to(dtype) for tensor in tensors]


# ---- operator --------------------------------------------------------------------------------------------------------


def _allocate(sizes, inputs, wanted):
    """The operator's outputs, without values."""
    x = inputs.x
    return empty_like(x), x.new_empty(sizes.states, dtype=torch.float32) if wanted.return_final_states else None


def _forward(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs, options)
    results = out, final_states = _allocate(sizes, inputs, wanted)
    if out.numel():
        launch_forward(sizes, kernel_layout(inputs, options.reverse), options, out, final_states)
    elif wanted.return_final_states:
        final_states.zero_() if inputs.initial_states is None else final_states.copy_(inputs.initial_states)
    return results


def _forward_fake(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    return _allocate(check(inputs, options), inputs, wanted)


def launch_forward(sizes, inputs, options, out, final_states):
    """Runs the kernels. inputs: in kernel layout; x, dt, B, C, z and out may be Views. out or final_states: or None."""
    params = abi.MambaSsd()
    functions = place(params, inputs.A)
    fill(params, sizes, options, inputs, make(Results, (out, final_states)))
    workspace = allocate_workspace(functions["ssd_forward_workspace"], params, inputs.A)
    run(functions, "ssd_forward", params)
    del workspace  # held until here: the kernels have it now


class _Ssd(torch.autograd.Function):
    """Saves the inputs alone; with z, backward computes the output before the gate again."""

    @staticmethod
    def forward(ctx, *arguments):
        inputs, ctx.options, _ = unpack(arguments, Inputs, Options, Wanted)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return call_below_autograd(ssd_op, *arguments)

    @staticmethod
    def backward(ctx, dout, dfinal_states):
        if dout is None and dfinal_states is None:
            return no_gradients(Inputs, Options, Wanted)
        x, dt, A, B, C, D, z, *others = ctx.saved_tensors
        ungated, options = make(Ungated, (x, dt, A, B, C, D, *others)), ctx.options
        (need,) = unpack(ctx.needs_input_grad, Inputs)
        if dout is None:
            dout = torch.zeros_like(x)
        dz = None
        if z is not None:
            out, _ = call_in_backward(ssd_op, *flat(with_gate(ungated, None), options, Wanted(False)))
            dout, dz = gate_grads(dout, out, z)
        arguments = flat(ungated, options, WantedGradients(need.initial_states))
        grads = of_inputs(call_in_backward(ssd_backward_op, dout, dfinal_states, *arguments), dz)
        return *grads, *no_gradients(Options, Wanted)


def gate_grads(dout, ungated, z):
    """Gradients of ungated and z in out = ungated * silu(z), of their dtype."""
    dout, wide = dout.float(), z.float()
    sigmoid = torch.sigmoid(wide)
    dungated = dout * (wide * sigmoid)
    dz = dout * ungated.float() * sigmoid * (1 + wide * (1 - sigmoid))
    return dungated.to(z.dtype), dz.to(z.dtype)


ssd_op = define(
    f"ssd({signature(Inputs, Options, Wanted)}) -> (Tensor out, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_Ssd,
    called=NAME,
    planned=(),
)
