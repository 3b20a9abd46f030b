"""Causal depthwise convolution in the functions of the causal-conv1d package, built in.

out_{d,l} = silu?(bias_d + sum_w weight_{d,w} x_{d, l-(W-1)+w}). Letters: B batch, D channels, L length, W width 2..4.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, pointer, run
from mamba_ssm._torch import call, call_below_autograd, call_in_backward, define, watched
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops._shared.gradients import add_parts, empty_parts
from mamba_ssm.ops.causal_conv1d.arguments import check_weight, kernel_layout, wants_silu

_NAME = "causal_conv1d"


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """Causal depthwise convolution along the last dimension, differentiable once.

    Args:
        x: (B, D, L) float32, float16 or bfloat16; either the length or the channels contiguous in memory.
        weight: (D, W), W 2..4, and bias: (D); of any of these dtypes.
        seq_idx: (B, L) int32; taps that lie in another sequence count as zero. Not with initial or final states.
        initial_states: (B, D, W-1) of x's dtype, the inputs before the first; zero if None.
        return_final_states: also return the last W-1 inputs, (B, D, W-1) of x's dtype.
        final_states_out: (B, D, W-1) of x's dtype, to write them into.
        activation: None, "silu" or "swish".

    Returns:
        out (B, D, L) of x's dtype and memory layout; with return_final_states (out, final_states).

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, device, width, activation or combination is wrong.

    Same as causal_conv1d.causal_conv1d_fn of the causal-conv1d package; states work in both memory layouts.
    """
    silu = wants_silu(_NAME, activation)
    want_states = bool(return_final_states) or final_states_out is not None
    out, final_states = call(causal_conv1d_op, x, weight, bias, seq_idx, initial_states, want_states, silu)
    if final_states_out is not None:
        checks.check_tensor(_NAME, "final_states_out", final_states_out)
        if final_states_out.requires_grad and final_states_out.is_leaf and torch.is_grad_enabled():
            raise RuntimeError(f"{_NAME}: final_states_out is written in place and must not require a gradient")
        checks.check_same(_NAME, "final_states_out", final_states_out, final_states.shape, x, "x", "(B, D, W-1)")
        checks.check_writable(_NAME, "final_states_out", final_states_out)
        final_states = final_states_out.copy_(final_states)
    return (out, final_states) if return_final_states else out


def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """The last state_len inputs of each of several packed sequences, zeros before a shorter one.

    Args:
        x: (total length, D), the sequences one after the other. cu_seqlens: (sequences + 1) integers, where each
        sequence starts, and the total at the end. state_len: steps to keep, less than 2**31.

    Returns:
        (sequences, D, state_len) of x's dtype, a fit conv_state for causal_conv1d_update.

    Raises:
        TypeError: cu_seqlens is not of integers, or state_len is none. ValueError: a shape, a device or state_len is
        wrong, or cu_seqlens does not rise from 0 to at most the total length (values are looked at on the CPU alone).
    """
    name = "causal_conv1d_varlen_states"
    checks.check_tensor(name, "x", x)
    checks.check_tensor(name, "cu_seqlens", cu_seqlens)
    checks.check_dims(name, "x", x, 2, "(total length, D)")
    checks.check_dims(name, "cu_seqlens", cu_seqlens, 1, "(sequences + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: cu_seqlens must be int32 or int64, got {checks.short(cu_seqlens.dtype)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{name}: cu_seqlens must be on {x.device} like x, got {cu_seqlens.device}")
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: cu_seqlens must have shape (sequences + 1,), got (0,)")
    state_len = checks.check_integer(name, "state_len", state_len)
    if not 0 <= state_len < 2**31:
        raise ValueError(f"{name}: state_len must be at least 0 and less than 2**31, got {state_len}")
    if x.is_cpu and not watched():
        checks.check_bounds(name, cu_seqlens.tolist(), x.shape[0])
    if x.shape[0] == 0:
        x = F.pad(x, (0, 0, 0, 1))  # a row for the padding to name; the result is as differentiable as any
    start, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    position = end - state_len + torch.arange(state_len, device=x.device, dtype=cu_seqlens.dtype)
    inside = position >= start
    rows = x[torch.where(inside, position, torch.zeros_like(position)).clamp(min=0)]
    return torch.where(inside[:, :, None], rows, torch.zeros_like(rows)).transpose(1, 2)


# ---- checks and parameters -------------------------------------------------------------------------------------------


def _check(x, weight, bias, seq_idx, initial_states):
    """Raises on any argument that the kernels do not take; returns (batch, dim, seqlen, width)."""
    checks.check_dims(_NAME, "x", x, 3, "(B, D, L)")
    checks.check_activation_dtype(_NAME, "x", x)
    batch, dim, seqlen = x.shape
    width = check_weight(_NAME, x, dim, weight, bias)
    if seq_idx is not None:
        checks.check_int32(_NAME, "seq_idx", seq_idx, (batch, seqlen), x, "x", "(B, L)")
        if initial_states is not None:
            raise ValueError(f"{_NAME}: seq_idx and initial_states cannot be given together")
    if initial_states is not None:
        shape = (batch, dim, width - 1)
        checks.check_same(_NAME, "initial_states", initial_states, shape, x, "x", "(B, D, W-1)")
    return batch, dim, seqlen, width


def _fill(params, sizes, x, weight, bias, seq_idx, initial_states, silu):
    """Sets the fields that forward and backward share, from tensors in kernel layout."""
    params.batch, params.dim, params.seqlen, params.width = sizes
    params.silu = silu
    params.dtype = DTYPE_CODES[x.dtype]
    params.weight_dtype = DTYPE_CODES[weight.dtype]
    params.x = x.data_ptr()
    params.x_batch_stride, params.x_dim_stride, params.x_len_stride = x.stride()
    params.weight = weight.data_ptr()
    if bias is not None:
        params.bias = bias.data_ptr()
        params.bias_dtype = DTYPE_CODES[bias.dtype]
    if seq_idx is not None:
        params.seq_idx = seq_idx.data_ptr()
    if initial_states is not None:
        params.initial_states = initial_states.data_ptr()
        strides = initial_states.stride()
        params.initial_batch_stride, params.initial_dim_stride, params.initial_len_stride = strides


# ---- forward operator ------------------------------------------------------------------------------------------------


def _allocate(x, width, return_final_states):
    final_states = x.new_empty((x.shape[0], x.shape[1], width - 1)) if return_final_states else None
    return kernel_layout(torch.empty_like(x)), final_states


def _check_forward(x, weight, bias, seq_idx, initial_states, return_final_states):
    sizes = _check(x, weight, bias, seq_idx, initial_states)
    if return_final_states and seq_idx is not None:
        raise ValueError(f"{_NAME}: seq_idx and final states cannot be asked for together")
    return sizes


def _forward(x, weight, bias, seq_idx, initial_states, return_final_states, silu):
    sizes = _check_forward(x, weight, bias, seq_idx, initial_states, return_final_states)
    x = kernel_layout(x)
    out, final_states = _allocate(x, sizes[3], return_final_states)
    if x.numel() == 0:
        if final_states is not None:
            final_states.zero_() if initial_states is None else final_states.copy_(initial_states)
        return out, final_states
    weight, bias, seq_idx = weight.contiguous(), checks.contiguous(bias), checks.contiguous(seq_idx)
    launch_forward(sizes, x, weight, bias, seq_idx, initial_states, silu, out, final_states)
    return out, final_states


def launch_forward(sizes, x, weight, bias, seq_idx, initial_states, silu, out, final_states):
    """The kernels. x, out: tensors or Views (B, D, L), length or channels with stride 1."""
    params = abi.MambaCausalConv1d()
    functions = place(params, weight)
    _fill(params, sizes, x, weight, bias, seq_idx, initial_states, silu)
    params.out = out.data_ptr()
    params.out_batch_stride, params.out_dim_stride, params.out_len_stride = out.stride()
    if final_states is not None:
        params.final_states = final_states.data_ptr()
        strides = final_states.stride()
        params.final_batch_stride, params.final_dim_stride, params.final_len_stride = strides
    run(functions, "causal_conv1d_forward", params)


def _forward_fake(x, weight, bias, seq_idx, initial_states, return_final_states, silu):
    sizes = _check_forward(x, weight, bias, seq_idx, initial_states, return_final_states)
    return _allocate(kernel_layout(x), sizes[3], return_final_states)


class _CausalConv1d(torch.autograd.Function):
    """Saves the inputs; what silu needs is computed again in backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, seq_idx, initial_states, return_final_states, silu):
        inputs = (x, weight, bias, seq_idx, initial_states)
        out, final_states = call_below_autograd(causal_conv1d_op, *inputs, return_final_states, silu)
        ctx.save_for_backward(*inputs)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        return out, final_states

    @staticmethod
    def backward(ctx, dout, dfinal_states):
        inputs = ctx.saved_tensors
        if dout is None and dfinal_states is None:
            return (None,) * 7
        if dout is None:
            dout = torch.zeros_like(inputs[0])
        dx, dweight, dbias, dinitial_states = call_in_backward(
            causal_conv1d_backward_op, dout, dfinal_states, *inputs, ctx.needs_input_grad[4], ctx.silu
        )
        return dx, dweight, dbias, None, dinitial_states, None, None


causal_conv1d_op = define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, "
    "bool return_final_states, bool silu) -> (Tensor out, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_CausalConv1d,
)


# ---- backward operator -----------------------------------------------------------------------------------------------


def _check_backward(dout, dfinal_states, inputs):
    sizes = batch, dim, _, width = _check(*inputs)
    x = inputs[0]
    checks.check_same(_NAME + "_backward", "dout", dout, x.shape, x, "x", "(B, D, L)")
    if dfinal_states is not None:
        shape = (batch, dim, width - 1)
        checks.check_same(_NAME + "_backward", "dfinal_states", dfinal_states, shape, x, "x", "(B, D, W-1)")
    return sizes


def _allocate_grads(sizes, x, weight, bias, need_dinitial_states):
    return [
        kernel_layout(torch.empty_like(x)),
        weight.new_empty(weight.shape),
        None if bias is None else bias.new_empty(bias.shape),
        x.new_empty((sizes[0], sizes[1], sizes[3] - 1)) if need_dinitial_states else None,
    ]


def _backward(dout, dfinal_states, x, weight, bias, seq_idx, initial_states, need_dinitial_states, silu, dx=None):
    """The operator; dx: where to write it, length or channels with stride 1, for callers that cut it out of a larger
    tensor.
    """
    sizes = batch, dim, _, width = _check_backward(dout, dfinal_states, (x, weight, bias, seq_idx, initial_states))
    x, dout = kernel_layout(x), kernel_layout(dout)
    if x.numel() == 0:
        grads = _allocate_grads(sizes, x, weight, bias, need_dinitial_states)
        grads = [None if grad is None else grad.zero_() for grad in grads]
        grads[0] = grads[0] if dx is None else dx
        if need_dinitial_states and dfinal_states is not None:
            grads[3].copy_(dfinal_states)
        return tuple(grads)
    dfinal_states = checks.contiguous(dfinal_states)
    weight, bias, seq_idx = weight.contiguous(), checks.contiguous(bias), checks.contiguous(seq_idx)
    if dx is None:
        dx = kernel_layout(torch.empty_like(x))
    dinitial_states = x.new_empty((batch, dim, width - 1)) if need_dinitial_states else None
    inputs = x, weight, bias, seq_idx, initial_states
    return dx, *launch_backward(sizes, dout, dfinal_states, *inputs, silu, dx, dinitial_states), dinitial_states


def launch_backward(sizes, dout, dfinal_states, x, weight, bias, seq_idx, initial_states, silu, dx, dinitial_states):
    """The kernels, and the parameters' gradients. dout, x, dx: as launch_forward's x."""
    params = abi.MambaCausalConv1dBackward()
    functions = place(params, weight)
    _fill(params, sizes, x, weight, bias, seq_idx, initial_states, silu)
    params.slots = slots = functions["causal_conv1d_backward_slots"](params.forward)
    dweight = empty_parts(weight, slots, weight.dtype)
    dbias = None if bias is None else empty_parts(bias, slots, bias.dtype)
    params.dout = dout.data_ptr()
    params.dout_batch_stride, params.dout_dim_stride, params.dout_len_stride = dout.stride()
    params.dx = dx.data_ptr()
    params.dx_batch_stride, params.dx_dim_stride, params.dx_len_stride = dx.stride()
    params.dfinal_states = pointer(dfinal_states)
    params.dinitial_states = pointer(dinitial_states)
    params.dweight = dweight.data_ptr()
    params.dbias = pointer(dbias)
    run(functions, "causal_conv1d_backward", params)
    return add_parts(dweight, weight), add_parts(dbias, bias)


def _backward_fake(dout, dfinal_states, x, weight, bias, seq_idx, initial_states, need_dinitial_states, silu):
    sizes = _check_backward(dout, dfinal_states, (x, weight, bias, seq_idx, initial_states))
    return tuple(_allocate_grads(sizes, kernel_layout(x), weight, bias, need_dinitial_states))


causal_conv1d_backward_op = define(
    "causal_conv1d_backward(Tensor dout, Tensor? dfinal_states, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor? seq_idx, Tensor? initial_states, bool need_dinitial_states, bool silu) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_states)",
    _backward,
    _backward_fake,
)
