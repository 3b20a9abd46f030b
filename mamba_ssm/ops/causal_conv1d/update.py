"""One or a few decoding steps of the causal convolution; the state is updated in place."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import call, define, look_at_values, make, reference, signature, wrote_in_place
from mamba_ssm.ops._shared.indices import cache_rows
from mamba_ssm.ops.causal_conv1d.arguments import check_conv_state, check_weight, wants_silu
from mamba_ssm.ops.causal_conv1d.reference import causal_conv1d_update_ref

_NAME = "causal_conv1d_update"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; conv_state is written in place."""

    x: torch.Tensor
    conv_state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    conv_state_indices: torch.Tensor | None


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    state_len: int
    width: int


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
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
        out of x's shape and dtype, without a gradient: out and the new state are detached, and a warning says so where
        an input requires one and grad mode is on. causal_conv1d_step returns the new state instead, with a gradient.

    Same as causal_conv1d.causal_conv1d_update of the causal-conv1d package.
    """
    silu = wants_silu(_NAME, activation)
    if reference.on:
        return causal_conv1d_update_ref(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    return call(causal_conv1d_update_op, x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu)


# ---- operator --------------------------------------------------------------------------------------------------------


def _check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    x, conv_state, cache_seqlens, rows = inputs.x, inputs.conv_state, inputs.cache_seqlens, inputs.conv_state_indices
    if x.dim() not in (2, 3):
        raise ValueError(f"{_NAME}: x must be (B, D) or (B, D, L), got shape {tuple(x.shape)}")
    checks.check_activation_dtype(_NAME, "x", x)
    batch, dim, seqlen = x.shape if x.dim() == 3 else (*x.shape, 1)
    width = check_weight(_NAME, x, dim, inputs.weight, inputs.bias)
    state_rows = batch if rows is None or conv_state.dim() != 3 else conv_state.shape[0]
    state_len = check_conv_state(_NAME, conv_state, state_rows, dim, width, x, "x")
    if cache_seqlens is not None:
        checks.check_index(_NAME, "cache_seqlens", cache_seqlens, (batch,), x, "x", "(B,)")
    if rows is not None:
        checks.check_index(_NAME, "conv_state_indices", rows, (batch,), x, "x", "(B,)")
    return Sizes(batch, dim, seqlen, state_len, width)


def _buffer_positions(cache_seqlens, conv_state_indices, state_len):
    """cache_seqlens as contiguous int32. The kernels take them modulo state_len: int64 is, before it is cut to that."""
    if cache_seqlens.is_cpu:
        look_at_values()
        padding = [False] * len(cache_seqlens) if conv_state_indices is None else (conv_state_indices < 0).tolist()
        for seqlen, padded in zip(cache_seqlens.tolist(), padding, strict=True):
            if seqlen < 0 and not padded:
                raise ValueError(f"{_NAME}: cache_seqlens must be at least 0, got {seqlen}")
    if cache_seqlens.dtype == torch.int64:
        cache_seqlens = cache_seqlens.remainder(state_len).to(torch.int32)
    return cache_seqlens.contiguous()


def _update(*arguments):
    *tensors, silu = arguments
    inputs = make(Inputs, tensors)
    sizes, x, conv_state = _check(inputs), inputs.x, inputs.conv_state
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    weight, bias, rows = inputs.weight.contiguous(), checks.contiguous(inputs.bias), inputs.conv_state_indices
    params = abi.MambaCausalConv1dUpdate()
    functions = place(params, x)
    params.batch, params.dim, params.seqlen, params.state_len, params.width = sizes
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
    if inputs.cache_seqlens is not None:
        positions = _buffer_positions(inputs.cache_seqlens, rows, sizes.state_len)
        params.cache_seqlens = positions.data_ptr()
    if rows is not None:
        rows = cache_rows(_NAME, "conv_state_indices", rows, conv_state.shape[0])
        params.conv_state_indices = rows.data_ptr()
    run(functions, "causal_conv1d_update", params)
    wrote_in_place(conv_state)
    return out


def _update_fake(*arguments):
    *tensors, _ = arguments
    inputs = Inputs(*tensors)
    _check(inputs)
    return torch.empty_like(inputs.x)


causal_conv1d_update_op = define(
    f"causal_conv1d_update({signature(Inputs, written=['conv_state'])}, bool silu) -> Tensor",
    _update,
    _update_fake,
    differentiable=False,
    planned=(),
)
