"""Mamba-3's scan (arXiv 2603.15569), single-input (SISO, rank 1) and multi-input (MIMO): the public function and its
operator on the native kernels.
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
    signature,
    unpack,
)
from mamba_ssm.ops.mamba3_scan.arguments import (
    NAME,
    FinalStates,
    Inputs,
    Options,
    Out,
    States,
    check,
    check_bounds_at_hand,
    fill,
    kernel_layout,
    new_like,
    out_shape,
)
from mamba_ssm.ops.mamba3_scan.backward import MOST_CUDA_RANK, gradients_by_torch, mamba3_scan_backward_op
from mamba_ssm.ops.mamba3_scan.reference import mamba3_scan_ref


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    return_final_states: bool


def mamba3_scan(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    ADT: torch.Tensor,
    DT: torch.Tensor,
    Trap: torch.Tensor,
    Q_bias: torch.Tensor,
    K_bias: torch.Tensor,
    Angles: torch.Tensor,
    D: torch.Tensor | None = None,
    Z: torch.Tensor | None = None,
    MIMO_V: torch.Tensor | None = None,
    MIMO_Z: torch.Tensor | None = None,
    MIMO_Out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    initial_states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pairwise: bool = True,
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, States]:
    """Mamba-3's scan, with gradients of every floating-point argument. A step of a head, lambda = sigmoid(Trap):

        angle = (angle + pi tanh(Angles) DT) mod 2 pi
        q_r = turn(Q_r + Q_bias_r, angle);  k'_r = turn(K_r + K_bias_r, angle)
        h = exp(ADT) (h + (1 - lambda) DT sum_r (MIMO_V_r v) k_r^T) + lambda DT sum_r (MIMO_V_r V) k'_r^T
        y_r = h q_r + D (MIMO_V_r V);  k = k';  v = V
        y_r = y_r / sqrt(mean(y_r^2) + norm_eps) norm_weight, if that is given
        out = sum_r MIMO_Out_r y_r silu(MIMO_Z_r Z)

    Letters: B batch, L length, R rank, H heads, P headdim, G groups, N dstate, S angles, U sequences (B, or those that
    cu_seqlens bounds).

    Args:
        Q, K: (B, L, R, G, N) of V's dtype, where G divides H: H / G neighbouring heads share a group. N is 1..256.
        V, Z: (B, L, H, P) of one dtype: float32, float16 or bfloat16. P is 1..256. Without Z there is no gate.
        ADT, DT, Trap: (B, L, H) of any of these dtypes and any strides. ADT and DT are independent inputs.
        Q_bias, K_bias: (H, R, N) float32 (as every parameter, widened if it comes narrower).
        Angles: (B, L, H, S), or (B, L, S) for all heads, S <= N / 2.
        D: (H). MIMO_V, MIMO_Z, MIMO_Out: (H, R, P), ones if None, but see the result. norm_weight: (H, P).
        initial_states: angle (U, H, S), ssm (U, H, P, N), k (U, R, H, N), v (U, H, P), as they are returned; zero if
            None.
        seq_idx: (B, L) int32; the states restart from zero at each step whose value differs from the step before.
        cu_seqlens: (U + 1) int32: 0, where the other sequences packed in the one row of a batch of 1 begin, and the end
            of the last. Outputs of steps behind it are zero.
        pairwise: an angle turns the entries (2i, 2i + 1) of Q and K, as SISO has it; False: (i, i + N // 2), as MIMO.
        return_final_states: also return the states after the last step, with seq_idx of each row's last sequence.

    Returns:
        out (B, L, H, P) of V's dtype, without MIMO_Out (B, L, R, H, P); or a tuple of it and States, float32. Gradients
        flow into initial_states and out of the final ones. Arithmetic is float32.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, a device or a value is wrong.

    Only inputs are kept for backward, which computes the states again. For CUDA tensors with a rank above 16 backward
    has no kernel: it takes the operators of torch, chunk by chunk, which is slower, and packed sequences cost it a
    synchronisation.
    A NaN or infinity of an input stays in its row's results and, on the CPU, in its packed sequence and behind its
    step. On CUDA it may reach all of its tile of up to 64 steps: tensor cores multiply masked zeros.
    """
    if initial_states is None:
        states: tuple[torch.Tensor | None, ...] = (None,) * 4
    elif len(initial_states) == 4:
        states = tuple(map(checks.widen, initial_states))
    else:
        raise ValueError(f"{NAME}: initial_states must be four tensors or None, got {len(initial_states)}")
    if isinstance(V, torch.Tensor) and autocast_dtype(V) is not None:  # which leaves some inputs wider: norms' outputs
        Q, K, Z = (checks.cast(tensor, V.dtype) for tensor in (Q, K, Z))
    parameters = map(checks.widen, (D, MIMO_V, MIMO_Z, MIMO_Out, norm_weight))
    D, MIMO_V, MIMO_Z, MIMO_Out, norm_weight = parameters
    biases = checks.widen(Q_bias), checks.widen(K_bias)
    tensors = Q, K, V, ADT, DT, Trap, *biases, Angles, D, Z, MIMO_V, MIMO_Z, MIMO_Out, norm_weight
    if cu_seqlens is not None:
        checks.check_dims(NAME, "V", V, 4, "(B, L, H, P)")
        check_bounds_at_hand(NAME, V, cu_seqlens)
    options = Options(bool(pairwise), checks.check_number(NAME, "norm_eps", norm_eps))
    wanted = bool(return_final_states)
    if reference.on:
        given: typing.Any = None if initial_states is None else states
        return mamba3_scan_ref(*tensors, options.norm_eps, given, seq_idx, cu_seqlens, options.pairwise, wanted)
    out, *finals = call(mamba3_scan_op, *tensors, *states, seq_idx, cu_seqlens, *options, wanted)
    return (out, States(*finals)) if return_final_states else out


# ---- operator --------------------------------------------------------------------------------------------------------


def _allocate(sizes, inputs, wanted):
    """The operator's outputs, without values."""
    V = inputs.V
    shapes = sizes.states if wanted.return_final_states else ()
    finals = [V.new_empty(shape, dtype=torch.float32) for shape in shapes] or [None] * 4
    return (new_like(V, inputs, out_shape(sizes, inputs)), *finals)


def _forward(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs)
    results = _allocate(sizes, inputs, wanted)
    launch_forward(sizes, kernel_layout(inputs), options, *results)
    return results


def _forward_fake(*arguments):
    inputs, _, wanted = unpack(arguments, Inputs, Options, Wanted)
    return _allocate(check(inputs), inputs, wanted)


def launch_forward(sizes, inputs, options, out, final_angle, final_ssm, final_k, final_v):
    """Writes out and the final states, unless these are None, of tensors or Views in kernel layout."""
    params = abi.MambaMamba3()
    functions = place(params, out)
    finals = final_angle, final_ssm, final_k, final_v
    fill(params, sizes, inputs, options, Out(out), FinalStates(*finals))
    workspace = out.new_empty(functions["mamba3_forward_workspace"](params), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    run(functions, "mamba3_forward", params)
    del workspace  # held until here: the kernels have it now


class _Mamba3Scan(torch.autograd.Function):
    """Saves the inputs alone."""

    @staticmethod
    def forward(ctx, *arguments):
        inputs, ctx.options, _ = unpack(arguments, Inputs, Options, Wanted)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return call_below_autograd(mamba3_scan_op, *arguments)

    @staticmethod
    def backward(ctx, dout, *dfinals):
        if dout is None and all(gradient is None for gradient in dfinals):
            return no_gradients(Inputs, Options, Wanted)
        inputs = make(Inputs, ctx.saved_tensors)
        if dout is None:
            rows = () if inputs.MIMO_Out is not None else (inputs.Q.shape[2],)
            dout = inputs.V.new_zeros((*inputs.V.shape[:2], *rows, *inputs.V.shape[2:]))
        if inputs.V.is_cuda and inputs.Q.shape[2] > MOST_CUDA_RANK:  # no kernel
            grads = gradients_by_torch(dout, dfinals, inputs, ctx.options)
        else:
            grads = call_in_backward(mamba3_scan_backward_op, dout, *dfinals, *inputs, *ctx.options)
        return *grads, None, None, *no_gradients(Options, Wanted)  # None: of seq_idx and cu_seqlens


mamba3_scan_op = define(
    f"mamba3_scan({signature(Inputs, Options, Wanted)}) -> "
    "(Tensor out, Tensor final_angle, Tensor final_ssm, Tensor final_k, Tensor final_v)",
    _forward,
    _forward_fake,
    autograd=_Mamba3Scan,
    called=NAME,
    planned=(),
)
