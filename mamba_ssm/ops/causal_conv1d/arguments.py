"""What the convolution's operators share: their arguments as records, checks, memory layout and parameters.

Letters: B batch, D channels, L length, W width.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec, backwards_in_time
from mamba_ssm.ops._shared.spec import fill as fill_fields

NAME = "causal_conv1d"  # what errors call the operators
_CHANNELS = Arg("same", "B, D, L", "batch dim len")
_WEIGHT, _BIAS = Arg("", "D, W"), Arg("", "D")


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    x: Annotated[torch.Tensor, _CHANNELS._replace(dtype="activation", code="dtype")]
    weight: Annotated[torch.Tensor, _WEIGHT._replace(code="weight_dtype")]
    bias: Annotated[torch.Tensor | None, _BIAS._replace(code="bias_dtype")]
    seq_idx: Annotated[torch.Tensor | None, Arg("int32", "B, L")]
    initial_states: Annotated[torch.Tensor | None, Arg("same", "B, D, W-1", "batch dim len", stem="initial")]


class Results(typing.NamedTuple):
    """Forward's; final_states is None where it is not wanted."""

    out: Annotated[torch.Tensor, _CHANNELS]
    final_states: Annotated[torch.Tensor | None, Arg("", "B, D, W-1", "batch dim len", stem="final")]


class Incoming(typing.NamedTuple):
    """The gradients that backward starts from."""

    dout: Annotated[torch.Tensor, _CHANNELS]
    dfinal_states: Annotated[torch.Tensor | None, Arg("", "B, D, W-1")]


class Gradients(typing.NamedTuple):
    """Backward's results, None for those of absent inputs."""

    dx: Annotated[torch.Tensor, _CHANNELS]
    dweight: Annotated[torch.Tensor, _WEIGHT]
    dbias: Annotated[torch.Tensor | None, _BIAS]
    dinitial_states: Annotated[torch.Tensor | None, Arg("", "B, D, W-1")]


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


_SPEC = Spec(NAME, Inputs)


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    sizes, x = _SPEC.bind(inputs), inputs.x
    sizes["W"] = check_weight(NAME, x, sizes["D"], inputs.weight, inputs.bias)
    _SPEC.check(inputs, sizes)
    return make(Sizes, [sizes[letter] for letter in "BDLW"])


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
    laid_out = _SPEC.layout(inputs)
    return laid_out._replace(x=unit_stride(inputs.x), seq_idx=in_order(inputs.seq_idx, reverse))


def in_order(seq_idx, reverse):
    """seq_idx (B, L) as kernels take it, which with reverse take the last step first."""
    return seq_idx.flip(1) if reverse and seq_idx is not None else checks.contiguous(seq_idx)


def unit_stride(x):
    """x as it is if its length or its channels have stride 1, else contiguous."""
    _, dim_stride, len_stride = x.stride()
    return x if len_stride == 1 or dim_stride == 1 else x.contiguous()


def fill(params, sizes, options, *records):
    """Sets the fields of records of tensors in kernel layout; x, out and gradients of theirs may be Views."""
    if options.reverse:
        lengths = {"L": sizes.seqlen, "W-1": sizes.width - 1}
        records = [backwards_in_time(record, lengths) for record in records]
    fill_fields(params, sizes, options, *records)
