"""One or a few decoding steps of the causal convolution; the state is updated in place."""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import call, define, wrote_in_place
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops._shared.indices import cache_rows
from mamba_ssm.ops.causal_conv1d.arguments import check_weight, wants_silu

_NAME = "causal_conv1d_update"


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    """Convolves new inputs with the state of earlier ones, and updates that state in place.

    Args:
        x: (B, D), or (B, D, L) for several steps; float32, float16 or bfloat16.
        conv_state: (B, D, S) with S >= W-1, the last inputs, newest last; its own float dtype.
        weight: (D, W), W 2..4, and bias: (D); of any of these dtypes.
        activation: None, "silu" or "swish".
        cache_seqlens: (B) int32 or int64; if given, conv_state is a circular buffer written from cache_seqlens[b] % S
            on. A negative one (but for padding) is an error on the CPU; on a GPU it counts from the buffer's end.
        conv_state_indices: (B) int32 or int64, the row of conv_state for each entry of x. A negative row is padding,
            its output zero. A row beyond conv_state or named twice is an error on the CPU; on a GPU, where looking at
            the values would synchronise, the output of a row beyond is NaN and no state is touched, and entries that
            name the same row race: its state and their outputs are then undefined.

    Returns:
        Output of x's shape and dtype. There is no gradient: inputs that require one are refused.

    Same as causal_conv1d.causal_conv1d_update of the causal-conv1d package.
    """
    silu = wants_silu(_NAME, activation)
    return call(causal_conv1d_update_op, x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu)


def _check(x, conv_state, weight, bias, cache_seqlens, conv_state_indices):
    """Raises on any argument that the kernels do not take; returns (batch, dim, seqlen, state_len, width)."""
    if x.dim() not in (2, 3):
        raise ValueError(f"{_NAME}: x must be (B, D) or (B, D, L), got shape {tuple(x.shape)}")
    checks.check_activation_dtype(_NAME, "x", x)
    batch, dim = x.shape[0], x.shape[1]
    seqlen = x.shape[2] if x.dim() == 3 else 1
    width = check_weight(_NAME, x, dim, weight, bias)
    checks.check_dims(_NAME, "conv_state", conv_state, 3, "(B, D, S)")
    rows, _, state_len = conv_state.shape
    if conv_state_indices is None:
        rows = batch
    checks.check_float(_NAME, "conv_state", conv_state, (rows, dim, state_len), x, "x", "(B, D, S)")
    checks.check_writable(_NAME, "conv_state", conv_state)
    if state_len < width - 1:
        raise ValueError(f"{_NAME}: conv_state must hold at least W-1 = {width - 1} steps, got S = {state_len}")
    if cache_seqlens is not None:
        checks.check_index(_NAME, "cache_seqlens", cache_seqlens, (batch,), x, "x", "(B,)")
    if conv_state_indices is not None:
        checks.check_index(_NAME, "conv_state_indices", conv_state_indices, (batch,), x, "x", "(B,)")
    return batch, dim, seqlen, state_len, width


def _buffer_positions(cache_seqlens, conv_state_indices, state_len):
    """cache_seqlens as contiguous int32. The kernels take them modulo state_len: int64 is, before it is cut to that."""
    if cache_seqlens is None:
        return None
    if cache_seqlens.is_cpu:
        padding = [False] * len(cache_seqlens) if conv_state_indices is None else (conv_state_indices < 0).tolist()
        for seqlen, padded in zip(cache_seqlens.tolist(), padding, strict=True):
            if seqlen < 0 and not padded:
                raise ValueError(f"{_NAME}: cache_seqlens must be at least 0, got {seqlen}")
    if cache_seqlens.dtype == torch.int64:
        cache_seqlens = cache_seqlens.remainder(state_len).to(torch.int32)
    return cache_seqlens.contiguous()


def _update(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu):
    batch, dim, seqlen, state_len, width = _check(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    weight, bias = weight.contiguous(), checks.contiguous(bias)
    cache_seqlens = _buffer_positions(cache_seqlens, conv_state_indices, state_len)
    if conv_state_indices is not None:
        conv_state_indices = cache_rows(_NAME, "conv_state_indices", conv_state_indices, conv_state.shape[0])
    params = abi.MambaCausalConv1dUpdate()
    functions = place(params, x)
    params.batch, params.dim, params.seqlen, params.state_len, params.width = batch, dim, seqlen, state_len, width
    params.silu = silu
    params.dtype = DTYPE_CODES[x.dtype]
    params.state_dtype = DTYPE_CODES[conv_state.dtype]
    params.weight_dtype = DTYPE_CODES[weight.dtype]
    params.x = x.data_ptr()
    params.out = out.data_ptr()
    if x.dim() == 3:
        params.x_batch_stride, params.x_dim_stride, params.x_len_stride = x.stride()
        params.out_batch_stride, params.out_dim_stride, params.out_len_stride = out.stride()
    else:
        params.x_batch_stride, params.x_dim_stride = x.stride()
        params.out_batch_stride, params.out_dim_stride = out.stride()
    params.conv_state = conv_state.data_ptr()
    params.state_rows = conv_state.shape[0]
    params.state_row_stride, params.state_dim_stride, params.state_len_stride = conv_state.stride()
    params.weight = weight.data_ptr()
    if bias is not None:
        params.bias = bias.data_ptr()
        params.bias_dtype = DTYPE_CODES[bias.dtype]
    if cache_seqlens is not None:
        params.cache_seqlens = cache_seqlens.data_ptr()
    if conv_state_indices is not None:
        params.conv_state_indices = conv_state_indices.data_ptr()
    run(functions, "causal_conv1d_update", params)
    wrote_in_place(conv_state)
    return out


def _update_fake(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu):
    _check(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    return torch.empty_like(x)


causal_conv1d_update_op = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens, "
    "Tensor? conv_state_indices, bool silu) -> Tensor",
    _update,
    _update_fake,
    differentiable=False,
)
