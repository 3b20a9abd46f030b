"""What the gated norm's operators share: their arguments as records, checks, memory layout and parameters."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import make
from mamba_ssm.ops.norm import arguments as common

NAME = "layernorm_gated"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order. For launchers x and z are rows: (tensor or View, stride)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    z: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else both operators take."""

    group_size: torch.SymInt
    norm_before_gate: bool
    is_rms_norm: bool


class Kept(typing.NamedTuple):
    """What forward keeps for backward of each group; mean is None of RMSNorm."""

    mean: torch.Tensor | None
    rstd: torch.Tensor


class Gradients(typing.NamedTuple):
    """Backward's results, None for those of absent inputs. For the launcher dx and dz are rows."""

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None
    dz: torch.Tensor | None


def check(op, inputs, options):
    """Raises on any argument that the kernels do not take; returns the number of groups."""
    x, group_size = inputs.x, options.group_size
    common.check_rows(op, "x", x)
    common.check_parameters(op, x, inputs.weight, inputs.bias)
    if inputs.z is not None:
        common.check_beside(op, "z", inputs.z, x)
    width = x.shape[-1]
    if width == 0:
        return 1
    if group_size < 1 or width % group_size:
        raise ValueError(f"{op}: group_size must divide the last dimension of x, {width}, got {group_size}")
    return width // group_size


def kernel_layout(inputs):
    """As launchers take them."""
    x, weight, bias, z = inputs
    rows = common.in_rows(x), weight.contiguous(), checks.contiguous(bias), None if z is None else common.in_rows(z)
    return make(Inputs, rows)


def fill(params, rows, inputs, options):
    """Sets the fields that forward and backward share."""
    x, params.x_row_stride = inputs.x
    params.x = x.data_ptr()
    other_dtype = x.dtype
    if inputs.z is not None:
        z, params.z_row_stride = inputs.z
        params.z = z.data_ptr()
        other_dtype = z.dtype
    parameters = inputs.weight, inputs.bias
    common.fill(params, rows, x.dtype, *parameters, options.group_size, options.is_rms_norm, other_dtype)
    params.norm_before_gate = options.norm_before_gate
