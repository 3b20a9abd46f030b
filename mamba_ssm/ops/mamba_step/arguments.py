"""A Mamba layer's decoding step: its arguments as records, their checks, and the kernels' parameters.

Letters: B batch, D channels, R dt_rank, N dstate, W width, S steps in conv_state, K = ceil(D / 32).
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec
from mamba_ssm.ops.causal_conv1d.arguments import check_conv_state, check_weight

NAME = "mamba_step"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; the states are written in place."""

    xz: Annotated[torch.Tensor, Arg("activation", "B, 2 D", "batch -", code="dtype")]
    conv_state: Annotated[torch.Tensor, Arg("", "B, D, S", "batch dim len", code="conv_state_dtype")]
    ssm_state: Annotated[torch.Tensor, Arg("float", "B, D, N", "batch dim dstate", field="state", code="state_dtype")]
    conv1d_weight: Annotated[torch.Tensor, Arg("", "D, W", field="conv_weight", code="conv_weight_dtype")]
    conv1d_bias: Annotated[torch.Tensor | None, Arg("", "D", field="conv_bias", code="conv_bias_dtype")]
    x_proj_weight: Annotated[torch.Tensor, Arg("", "R + 2 N, D")]
    dt_proj_weight: Annotated[torch.Tensor, Arg("same", "D, R")]
    dt_bias: Annotated[torch.Tensor | None, Arg("float", "D", code="dt_bias_dtype")]
    A_log: Annotated[torch.Tensor, Arg("float", "D, N", code="A_log_dtype")]
    D: Annotated[torch.Tensor, Arg("float", "D", code="D_dtype")]
    x_proj_scales: Annotated[torch.Tensor | None, Arg("", "R + 2 N, K")] = None


class Results(typing.NamedTuple):
    out: Annotated[torch.Tensor, Arg("", "B, D", "batch -")]


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    dt_rank: int
    dstate: int
    state_len: int
    width: int


SPEC = Spec(NAME, Inputs)


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    sizes, xz = SPEC.bind(inputs), inputs.xz
    batch, dim, dt_rank, dstate = (sizes[letter] for letter in "BDRN")
    if xz.shape[1] != 2 * dim:
        raise ValueError(f"{NAME}: xz must have 2 D = {2 * dim} columns, as ssm_state has D = {dim}, got {xz.shape[1]}")
    checks.check_dstate(NAME, dstate, abi.MAX_DSTATE)
    if not 1 <= dt_rank <= abi.MAX_DT_RANK:
        raise ValueError(f"{NAME}: dt_rank must lie in 1..{abi.MAX_DT_RANK}, got {dt_rank}")
    SPEC.check(inputs, sizes)
    _check_x_proj(inputs, (dt_rank + 2 * dstate, dim))
    checks.check_writable(NAME, "ssm_state", inputs.ssm_state)
    width = check_weight(NAME, xz, dim, inputs.conv1d_weight, inputs.conv1d_bias, "xz", "conv1d_")
    state_len = check_conv_state(NAME, inputs.conv_state, batch, dim, width, xz, "xz")
    return make(Sizes, (batch, dim, dt_rank, dstate, state_len, width))


def _check_x_proj(inputs, shape):
    """x_proj_weight is of xz's dtype, or int8 with scales."""
    xz, weight, scales = inputs.xz, inputs.x_proj_weight, inputs.x_proj_scales
    checks.check_tensor(NAME, "x_proj_weight", weight)
    if scales is None:
        checks.check_same(NAME, "x_proj_weight", weight, shape, xz, "xz", "(R + 2 N, D)")
        return
    checks.check_is(NAME, "x_proj_weight", weight, torch.int8, shape, xz, "xz", "(R + 2 N, D)")
    blocks = shape[0], -(-shape[1] // abi.INT8_BLOCK)
    checks.check_is(NAME, "x_proj_scales", scales, torch.float16, blocks, xz, "xz", "(R + 2 N, ceil(D / 32))")
