"""A Mamba-2 layer's decoding step: its arguments as records, their checks, and the kernels' parameters.

Letters: B batch, H heads, P headdim, G groups of B and C, N dstate, I = H P + 2 G N, W width, S steps in conv_state.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import DTYPE_CODES, pointer
from mamba_ssm.ops.causal_conv1d.arguments import check_conv_state, check_weight
from mamba_ssm.ops.ssd.arguments import check_head

NAME = "mamba2_step"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; the states are written in place."""

    zxbcdt: torch.Tensor
    conv_state: torch.Tensor
    ssm_state: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    D: torch.Tensor
    rmsnorm_weight: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operator takes."""

    ngroups: int
    dt_min: float
    dt_max: float
    gate: bool
    rmsnorm_eps: float
    norm_before_gate: bool


class Sizes(typing.NamedTuple):
    batch: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    state_len: int
    width: int


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    zxbcdt, ssm_state, ngroups = inputs.zxbcdt, inputs.ssm_state, options.ngroups
    checks.check_dims(NAME, "zxbcdt", zxbcdt, 2, "(B, 2 H P + 2 G N + H)")
    checks.check_activation_dtype(NAME, "zxbcdt", zxbcdt)
    checks.check_dims(NAME, "ssm_state", ssm_state, 4, "(B, H, P, N)")
    batch, columns = zxbcdt.shape
    _, nheads, headdim, dstate = ssm_state.shape
    checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    check_head(NAME, headdim, dstate)
    dim = nheads * headdim
    channels = dim + 2 * ngroups * dstate
    if columns != dim + channels + nheads:
        raise ValueError(
            f"{NAME}: zxbcdt must have 2 H P + 2 G N + H = {dim + channels + nheads} columns with H = {nheads}, "
            f"P = {headdim}, G = {ngroups}, N = {dstate}, got {columns}"
        )
    states = batch, nheads, headdim, dstate
    checks.check_float(NAME, "ssm_state", ssm_state, states, zxbcdt, "zxbcdt", "(B, H, P, N)")
    checks.check_writable(NAME, "ssm_state", ssm_state)
    width = check_weight(NAME, zxbcdt, channels, inputs.conv1d_weight, inputs.conv1d_bias, "zxbcdt", "conv1d_")
    state_len = check_conv_state(NAME, inputs.conv_state, batch, channels, width, zxbcdt, "zxbcdt")
    for name, tensor in (("dt_bias", inputs.dt_bias), ("A_log", inputs.A_log)):
        checks.check_float(NAME, name, tensor, (nheads,), zxbcdt, "zxbcdt", "(H,)")
    D = inputs.D
    shape, letters = ((nheads, headdim), "(H, P)") if D.dim() == 2 else ((nheads,), "(H,)")
    checks.check_float(NAME, "D", D, shape, zxbcdt, "zxbcdt", letters)
    if inputs.rmsnorm_weight is not None:
        checks.check_float(NAME, "rmsnorm_weight", inputs.rmsnorm_weight, (dim,), zxbcdt, "zxbcdt", "(H P,)")
    return Sizes(batch, nheads, headdim, ngroups, dstate, state_len, width)


def kernel_layout(inputs):
    """As the kernels take them: zxbcdt's rows in a piece, parameters contiguous, the states as they are."""
    zxbcdt, conv_state, ssm_state, weight, bias, dt_bias, A_log, D, rmsnorm_weight = inputs
    if zxbcdt.stride(1) != 1:
        zxbcdt = zxbcdt.contiguous()
    parameters = map(checks.contiguous, (weight, bias, dt_bias, A_log, D, rmsnorm_weight))
    return Inputs(zxbcdt, conv_state, ssm_state, *parameters)


def fill(params, sizes, inputs, options, out):
    """Sets all fields but the run's."""
    zxbcdt, conv_state, ssm_state, weight, bias, dt_bias, A_log, D, rmsnorm_weight = inputs
    params.batch, params.nheads, params.headdim, params.ngroups, params.dstate, params.state_len, params.width = sizes
    params.gate = options.gate
    params.norm_before_gate = options.norm_before_gate
    params.dt_min = options.dt_min
    params.dt_max = options.dt_max
    params.norm_eps = options.rmsnorm_eps
    params.dtype = DTYPE_CODES[zxbcdt.dtype]
    params.zxBCdt = zxbcdt.data_ptr()
    params.zxBCdt_batch_stride = zxbcdt.stride(0)
    params.conv_state = conv_state.data_ptr()
    params.conv_state_dtype = DTYPE_CODES[conv_state.dtype]
    strides = conv_state.stride()
    params.conv_state_batch_stride, params.conv_state_dim_stride, params.conv_state_len_stride = strides
    params.conv_weight = weight.data_ptr()
    params.conv_weight_dtype = DTYPE_CODES[weight.dtype]
    if bias is not None:
        params.conv_bias = bias.data_ptr()
        params.conv_bias_dtype = DTYPE_CODES[bias.dtype]
    params.state = ssm_state.data_ptr()
    params.state_dtype = DTYPE_CODES[ssm_state.dtype]
    strides = ssm_state.stride()
    params.state_batch_stride, params.state_head_stride, params.state_dim_stride, params.state_dstate_stride = strides
    params.dt_bias = dt_bias.data_ptr()
    params.dt_bias_dtype = DTYPE_CODES[dt_bias.dtype]
    params.A_log = A_log.data_ptr()
    params.A_log_dtype = DTYPE_CODES[A_log.dtype]
    params.D = D.data_ptr()
    params.D_dtype = DTYPE_CODES[D.dtype]
    params.D_head_stride, params.D_dim_stride = D.stride() if D.dim() == 2 else (1, 0)
    params.norm_weight = pointer(rmsnorm_weight)
    if rmsnorm_weight is not None:
        params.norm_weight_dtype = DTYPE_CODES[rmsnorm_weight.dtype]
    params.out = out.data_ptr()
    params.out_batch_stride = out.stride(0)
