"""A Mamba layer's decoding step: its arguments as records, their checks, and the kernels' parameters.

Letters: B batch, D channels, R dt_rank, N dstate, W width, S steps in conv_state.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES
from mamba_ssm.ops.causal_conv1d.arguments import check_conv_state, check_weight

NAME = "mamba_step"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; the states are written in place."""

    xz: torch.Tensor
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    x_proj_weight: torch.Tensor
    dt_proj_weight: torch.Tensor
    dt_bias: torch.Tensor | None
    A_log: torch.Tensor
    D: torch.Tensor


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    dt_rank: int
    dstate: int
    state_len: int
    width: int


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    xz, ssm_state, A_log = inputs.xz, inputs.ssm_state, inputs.A_log
    checks.check_dims(NAME, "xz", xz, 2, "(B, 2 D)")
    checks.check_activation_dtype(NAME, "xz", xz)
    checks.check_dims(NAME, "ssm_state", ssm_state, 3, "(B, D, N)")
    batch, columns = xz.shape
    _, dim, dstate = ssm_state.shape
    if columns != 2 * dim:
        raise ValueError(f"{NAME}: xz must have 2 D = {2 * dim} columns, as ssm_state has D = {dim}, got {columns}")
    checks.check_dstate(NAME, dstate, abi.MAX_DSTATE)
    checks.check_float(NAME, "A_log", A_log, (dim, dstate), xz, "xz", "(D, N)")
    checks.check_float(NAME, "ssm_state", ssm_state, (batch, dim, dstate), xz, "xz", "(B, D, N)")
    checks.check_writable(NAME, "ssm_state", ssm_state)
    width = check_weight(NAME, xz, dim, inputs.conv1d_weight, inputs.conv1d_bias, "xz", "conv1d_")
    state_len = check_conv_state(NAME, inputs.conv_state, batch, dim, width, xz, "xz")
    dt_weight = inputs.dt_proj_weight
    checks.check_dims(NAME, "dt_proj_weight", dt_weight, 2, "(D, R)")
    dt_rank = dt_weight.shape[1]
    if not 1 <= dt_rank <= abi.MAX_DT_RANK:
        raise ValueError(f"{NAME}: dt_rank must lie in 1..{abi.MAX_DT_RANK}, got {dt_rank}")
    checks.check_same(NAME, "dt_proj_weight", dt_weight, (dim, dt_rank), xz, "xz", "(D, R)")
    shape = dt_rank + 2 * dstate, dim
    checks.check_same(NAME, "x_proj_weight", inputs.x_proj_weight, shape, xz, "xz", "(R + 2 N, D)")
    for name, tensor in (("dt_bias", inputs.dt_bias), ("D", inputs.D)):
        if tensor is not None:
            checks.check_float(NAME, name, tensor, (dim,), xz, "xz", "(D,)")
    return Sizes(batch, dim, dt_rank, dstate, state_len, width)


def kernel_layout(inputs):
    """As the kernels take them: xz's rows in a piece, parameters contiguous, the states as they are."""
    xz, conv_state, ssm_state, *parameters = inputs
    if xz.stride(1) != 1:
        xz = xz.contiguous()
    return Inputs(xz, conv_state, ssm_state, *map(checks.contiguous, parameters))


def fill(params, sizes, inputs, out):
    """Sets all fields but the run's and the workspace."""
    xz, conv_state, ssm_state, weight, bias, x_proj_weight, dt_proj_weight, dt_bias, A_log, D = inputs
    params.batch, params.dim, params.dt_rank, params.dstate, params.state_len, params.width = sizes
    params.dtype = DTYPE_CODES[xz.dtype]
    params.xz = xz.data_ptr()
    params.xz_batch_stride = xz.stride(0)
    params.conv_state = conv_state.data_ptr()
    params.conv_state_dtype = DTYPE_CODES[conv_state.dtype]
    strides = conv_state.stride()
    params.conv_state_batch_stride, params.conv_state_dim_stride, params.conv_state_len_stride = strides
    params.conv_weight = weight.data_ptr()
    params.conv_weight_dtype = DTYPE_CODES[weight.dtype]
    if bias is not None:
        params.conv_bias = bias.data_ptr()
        params.conv_bias_dtype = DTYPE_CODES[bias.dtype]
    params.x_proj_weight = x_proj_weight.data_ptr()
    params.dt_proj_weight = dt_proj_weight.data_ptr()
    if dt_bias is not None:
        params.dt_bias = dt_bias.data_ptr()
        params.dt_bias_dtype = DTYPE_CODES[dt_bias.dtype]
    params.state = ssm_state.data_ptr()
    params.state_dtype = DTYPE_CODES[ssm_state.dtype]
    params.state_batch_stride, params.state_dim_stride, params.state_dstate_stride = ssm_state.stride()
    params.A_log = A_log.data_ptr()
    params.A_log_dtype = DTYPE_CODES[A_log.dtype]
    params.D = D.data_ptr()
    params.D_dtype = DTYPE_CODES[D.dtype]
    params.out = out.data_ptr()
    params.out_batch_stride = out.stride(0)
