"""What the convolution's operators share: their arguments as records, checks, memory layout and parameters.

Letters: B batch, D channels, L length, W width.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import DTYPE_CODES, backwards

NAME = "causal_conv1d"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    seq_idx: torch.Tensor | None
    initial_states: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else all of the operators take."""

    silu: bool
    reverse: bool = False  # a step sees what follows it, not what is before it


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    width: int

    @property
    def states(self):
        """Shape of the inputs before the first step or of the last ones."""
        return self.batch, self.dim, self.width - 1


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    x, seq_idx, initial_states = inputs.x, inputs.seq_idx, inputs.initial_states
    if x.dim() != 3 or x.dtype not in checks.FLOAT_DTYPES:
        checks.check_dims(NAME, "x", x, 3, "(B, D, L)")
        checks.check_activation_dtype(NAME, "x", x)
    batch, dim, seqlen = x.shape
    sizes = Sizes(batch, dim, seqlen, check_weight(NAME, x, dim, inputs.weight, inputs.bias))
    if seq_idx is not None:
        checks.check_int32(NAME, "seq_idx", seq_idx, (batch, seqlen), x, "x", "(B, L)")
        if initial_states is not None:
            raise ValueError(f"{NAME}: seq_idx and initial_states cannot be given together")
    if initial_states is not None:
        checks.check_same(NAME, "initial_states", initial_states, sizes.states, x, "x", "(B, D, W-1)")
    return sizes


def check_weight(op, x, dim, weight, bias, x_name="x", prefix=""):
    """Checks weight (D, W) and bias (D); returns W. x_name, prefix: of the names that the caller's user knows.

    This runs at every call, so comparisons stand here and only a failure goes to the functions that explain it.
    """
    if weight.dim() != 2:
        checks.check_dims(op, f"{prefix}weight", weight, 2, "(D, W)")
    device, (rows, width) = x.device, weight.shape
    check_width(op, width, prefix)
    if rows != dim or weight.dtype not in checks.FLOAT_DTYPES or weight.device != device:
        checks.check_float(op, f"{prefix}weight", weight, (dim, width), x, x_name, "(D, W)")
    if bias is not None and (bias.shape != (dim,) or bias.dtype not in checks.FLOAT_DTYPES or bias.device != device):
        checks.check_float(op, f"{prefix}bias", bias, (dim,), x, x_name, "(D,)")
    return width


def check_width(op, width, prefix=""):
    """The kernels have code for these."""
    if not 2 <= width <= 4:
        raise ValueError(f"{op}: the width (last dimension of {prefix}weight) must be 2, 3 or 4, got {width}")


def check_conv_state(op, conv_state, rows, dim, width, like, like_name):
    """Checks a decoding state (rows, D, S), which is written in place; returns S."""
    checks.check_dims(op, "conv_state", conv_state, 3, "(B, D, S)")
    state_len = conv_state.shape[2]
    checks.check_float(op, "conv_state", conv_state, (rows, dim, state_len), like, like_name, "(B, D, S)")
    checks.check_writable(op, "conv_state", conv_state)
    if state_len < width - 1:
        raise ValueError(f"{op}: conv_state must hold at least W-1 = {width - 1} steps, got S = {state_len}")
    return state_len


def wants_silu(op: str, activation: str | None) -> bool:
    """True for silu, False for none."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be None, 'silu' or 'swish', got {activation!r}")
    return activation is not None


def kernel_layout(inputs, reverse=False):
    """The same tensors in the layout that the kernels take: initial_states may have any. seq_idx, 4 bytes a step, is
    the one tensor that goes to them in the order in which they take the steps.
    """
    if checks.all_contiguous(inputs) and not reverse:
        return inputs
    return Inputs(
        unit_stride(inputs.x),
        inputs.weight.contiguous(),
        checks.contiguous(inputs.bias),
        in_order(inputs.seq_idx, reverse),
        inputs.initial_states,
    )


def in_order(seq_idx, reverse):
    """seq_idx (B, L) as kernels take it, which with reverse take the last step first."""
    return seq_idx.flip(1) if reverse and seq_idx is not None else checks.contiguous(seq_idx)


def unit_stride(x):
    """x as it is if its length or its channels have stride 1, else contiguous."""
    _, dim_stride, len_stride = x.stride()
    return x if len_stride == 1 or dim_stride == 1 else x.contiguous()


def fill(params, sizes, inputs, options):
    """Sets the fields that forward and backward share, from tensors in kernel layout; x may be a View."""
    x, weight, bias, initial_states = inputs.x, inputs.weight, inputs.bias, inputs.initial_states
    if options.reverse:
        x = backwards(x, 2, sizes.seqlen)
        initial_states = None if initial_states is None else backwards(initial_states, 2, sizes.width - 1)
    params.batch, params.dim, params.seqlen, params.width = sizes
    params.silu = options.silu
    params.dtype = DTYPE_CODES[x.dtype]
    params.weight_dtype = DTYPE_CODES[weight.dtype]
    params.x = x.data_ptr()
    params.x_batch_stride, params.x_dim_stride, params.x_len_stride = x.stride()
    params.weight = weight.data_ptr()
    if bias is not None:
        params.bias = bias.data_ptr()
        params.bias_dtype = DTYPE_CODES[bias.dtype]
    if inputs.seq_idx is not None:
        params.seq_idx = inputs.seq_idx.data_ptr()
    if initial_states is not None:
        params.initial_states = initial_states.data_ptr()
        strides = initial_states.stride()
        params.initial_batch_stride, params.initial_dim_stride, params.initial_len_stride = strides
