"""Mamba-2's scan (state space duality): the public function and its operators on the native kernels.

h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  out_t = (h_t C_t + D x_t) silu(z_t);
dt_t = clamp(softplus?(dt_t + dt_bias), dt_limit) (Mamba-2, arXiv 2405.21060, section 6).
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import autocast_dtype, call, call_below_autograd, call_in_backward, define, watched
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.ssd.arguments import allocate_workspace, check, fill, kernel_layout
from mamba_ssm.ops.ssd.backward import ssd_backward_op

_PUBLIC_NAME = "mamba_chunk_scan_combined"


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
    state_dtype=None,
):
    """Mamba-2's scan along the length, differentiable once in every floating-point argument.

    Args:
        x, z: (B, L, H, P) of one dtype: float32, float16 or bfloat16. z gates the output with silu(z). P is 1..256.
        dt: (B, L, H) float32, float16 or bfloat16, the same as x's or another.
        A: (H) float32 (as every float32 argument, widened if it comes narrower).
        B, C: (B, L, G, N) of x's dtype, where G divides H: H / G neighbouring heads share a group. N is 1..256. Under
            autocast B, C and z are cast to x's dtype.
        chunk_size: a positive integer, upstream's tile size. It has no effect: the kernels choose their own.
        D: (H) or (H, P) float32, the skip connection. dt_bias: (H) float32, added to dt.
        initial_states: (B, H, P, N) float32, the states before the first step; zero if None.
        seq_idx: (B, L) int32; the states restart from zero at each step whose value differs from the step before.
        cu_seqlens: (sequences + 1) int32: 0, where the other sequences packed in the one row of a batch of 1 begin, and
            the end of the last. Without seq_idx the states restart at these steps; the first sequence starts from
            initial_states. That the values rise from 0 is checked on the CPU alone.
        dt_softplus: dt = softplus(dt + dt_bias). dt_limit: (smallest, largest) value of dt, which is then clamped.
        return_final_states: also return the states after the last step.
        return_varlen_states: also return the states after each sequence of cu_seqlens. They carry no gradient.
        state_dtype: dtype of the returned states, float32 if None; they are computed in float32.

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
    without seq_idx is an addition.
    """
    check_options(_PUBLIC_NAME, chunk_size, dt_limit, state_dtype)
    dt_min, dt_max = float(dt_limit[0]), float(dt_limit[1])
    A, D, dt_bias, initial_states = (checks.widen(tensor) for tensor in (A, D, dt_bias, initial_states))
    if isinstance(x, torch.Tensor) and autocast_dtype(x) is not None:  # which leaves some inputs wider: norms' outputs
        B, C, z = (checks.cast(tensor, x.dtype) for tensor in (B, C, z))
    if cu_seqlens is not None:
        checks.check_tensor(_PUBLIC_NAME, "cu_seqlens", cu_seqlens)
        _check_cu_seqlens(x, cu_seqlens)
        if x.is_cpu and not watched():
            checks.check_bounds(_PUBLIC_NAME, cu_seqlens.tolist(), x.shape[1])
        if seq_idx is None:
            steps = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
            seq_idx = torch.bucketize(steps, cu_seqlens[1:], right=True, out_int32=True)[None]
    elif return_varlen_states:
        raise ValueError(f"{_PUBLIC_NAME}: return_varlen_states needs cu_seqlens, got None")
    options = bool(dt_softplus), dt_min, dt_max
    out, final_states = call(
        ssd_op, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, *options, bool(return_final_states)
    )
    if not return_final_states and not return_varlen_states:
        return out
    results = [out]
    if return_final_states:
        results.append(final_states)
    if return_varlen_states:
        with torch.no_grad():
            results.append(call(ssd_varlen_states_op, x, dt, A, B, C, dt_bias, initial_states, cu_seqlens, *options))
    if state_dtype is not None:
        results[1:] = [states.to(state_dtype) for states in results[1:]]
    return tuple(results)


def check_options(name, chunk_size, dt_limit, state_dtype):
    """Raises on values of these arguments that mean nothing."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"{name}: chunk_size must be a positive integer, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be a positive integer, got {chunk_size}")
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise ValueError(f"{name}: dt_limit must be (smallest, largest), got {dt_limit!r}")
    if state_dtype is not None and not (isinstance(state_dtype, torch.dtype) and state_dtype.is_floating_point):
        raise TypeError(f"{name}: state_dtype must be a floating-point torch.dtype or None, got {state_dtype}")


def _check_cu_seqlens(x, cu_seqlens):
    checks.check_dims(_PUBLIC_NAME, "x", x, 4, "(B, L, H, P)")
    if x.shape[0] != 1:
        raise ValueError(
            f"{_PUBLIC_NAME}: cu_seqlens is for sequences packed in one row: x must have batch 1, got {x.shape[0]}"
        )
    checks.check_dims(_PUBLIC_NAME, "cu_seqlens", cu_seqlens, 1, "(sequences + 1,)")
    sequences = max(cu_seqlens.shape[0] - 1, 0)
    checks.check_int32(_PUBLIC_NAME, "cu_seqlens", cu_seqlens, (sequences + 1,), x, "x", "(sequences + 1,)")


# ---- forward operator ------------------------------------------------------------------------------------------------


def _allocate(sizes, x, return_final_states):
    batch, _, nheads, headdim, _, dstate = sizes
    states = (batch, nheads, headdim, dstate)
    return x.new_empty(x.shape), x.new_empty(states, dtype=torch.float32) if return_final_states else None


def _forward(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_softplus, dt_min, dt_max, return_final_states):
    sizes = check(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_min, dt_max)
    out, final_states = _allocate(sizes, x, return_final_states)
    if x.numel() == 0:
        if return_final_states:
            final_states.zero_() if initial_states is None else final_states.copy_(initial_states)
        return out, final_states
    tensors = kernel_layout(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    launch_forward(sizes, tensors, (dt_softplus, dt_min, dt_max), out, final_states)
    return out, final_states


def launch_forward(sizes, tensors, options, out, final_states):
    """Runs the kernels. tensors: x to seq_idx in kernel layout. x, dt, B, C, z and out may be Views."""
    params = abi.MambaSsd()
    A = tensors[2]
    functions = place(params, A)
    fill(params, sizes, tensors, *options)
    params.out = out.data_ptr()
    params.out_batch_stride, params.out_len_stride, params.out_head_stride, _ = out.stride()
    if final_states is not None:
        params.final_state = final_states.data_ptr()
    workspace = allocate_workspace(functions["ssd_forward_workspace"], params, A)
    run(functions, "ssd_forward", params)
    del workspace  # held until here: the kernels have it now


def _forward_fake(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, _, dt_min, dt_max, return_final_states):
    sizes = check(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_min, dt_max)
    return _allocate(sizes, x, return_final_states)


class _Ssd(torch.autograd.Function):
    """Saves the inputs alone; with z, backward computes the output before the gate again."""

    @staticmethod
    def forward(
        ctx,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        dt_softplus,
        dt_min,
        dt_max,
        return_final_states,
    ):
        inputs = (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
        options = (dt_softplus, dt_min, dt_max)
        ctx.save_for_backward(*inputs)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return call_below_autograd(ssd_op, *inputs, *options, return_final_states)

    @staticmethod
    def backward(ctx, dout, dfinal_states):
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx = ctx.saved_tensors
        if dout is None and dfinal_states is None:
            return (None,) * 14
        if dout is None:
            dout = torch.zeros_like(x)
        dz = None
        if z is not None:
            ungated, _ = call_in_backward(
                ssd_op, x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, *ctx.options, False
            )
            dout, dz = _gate_grads(dout, ungated, z)
        dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_states = call_in_backward(
            ssd_backward_op, dout, dfinal_states, x, dt, A, B, C, D, dt_bias, initial_states, seq_idx,
            *ctx.options, ctx.needs_input_grad[8],
        )  # fmt: skip
        return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states, None, None, None, None, None


def _gate_grads(dout, ungated, z):
    """Gradients of ungated and z in out = ungated * silu(z), of their dtype."""
    dout, wide = dout.float(), z.float()
    sigmoid = torch.sigmoid(wide)
    dungated = dout * (wide * sigmoid)
    dz = dout * ungated.float() * sigmoid * (1 + wide * (1 - sigmoid))
    return dungated.to(z.dtype), dz.to(z.dtype)


ssd_op = define(
    "ssd(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_states, Tensor? seq_idx, bool dt_softplus, float dt_min, float dt_max, bool return_final_states) "
    "-> (Tensor out, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_Ssd,
)


# ---- states of packed sequences --------------------------------------------------------------------------------------


def _check_varlen(x, dt, A, B, C, dt_bias, initial_states, cu_seqlens, dt_min, dt_max):
    sizes = check(x, dt, A, B, C, None, None, dt_bias, initial_states, None, dt_min, dt_max)
    _check_cu_seqlens(x, cu_seqlens)
    return cu_seqlens.shape[0] - 1, *sizes[1:]


def _varlen_states(x, dt, A, B, C, dt_bias, initial_states, cu_seqlens, dt_softplus, dt_min, dt_max):
    sizes = _check_varlen(x, dt, A, B, C, dt_bias, initial_states, cu_seqlens, dt_min, dt_max)
    sequences, _, nheads, headdim, _, dstate = sizes
    states = A.new_empty((sequences, nheads, headdim, dstate))
    if initial_states is not None:  # of the first sequence
        initial_states = torch.cat([initial_states, A.new_zeros((sequences, nheads, headdim, dstate))])[:sequences]
    if states.numel() == 0 or x.numel() == 0:
        return states.zero_() if initial_states is None else states.copy_(initial_states)
    params = abi.MambaSsd()
    functions = place(params, x)
    tensors = kernel_layout(x, dt, A, B, C, None, None, dt_bias, initial_states, None)
    fill(params, sizes, tensors, dt_softplus, dt_min, dt_max)
    cu_seqlens = cu_seqlens.contiguous()
    params.cu_seqlens = cu_seqlens.data_ptr()
    params.final_state = states.data_ptr()
    workspace = allocate_workspace(functions["ssd_forward_workspace"], params, x)
    run(functions, "ssd_forward", params)
    del tensors, workspace  # held until here: the kernels have them now
    return states


def _varlen_states_fake(x, dt, A, B, C, dt_bias, initial_states, cu_seqlens, _, dt_min, dt_max):
    sequences, _, nheads, headdim, _, dstate = _check_varlen(
        x, dt, A, B, C, dt_bias, initial_states, cu_seqlens, dt_min, dt_max
    )
    return A.new_empty((sequences, nheads, headdim, dstate))


ssd_varlen_states_op = define(
    "ssd_varlen_states(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor cu_seqlens, bool dt_softplus, float dt_min, float dt_max) -> Tensor",
    _varlen_states,
    _varlen_states_fake,
)
