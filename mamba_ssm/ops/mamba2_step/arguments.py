"""A Mamba-2 layer's decoding step: its arguments as records, their checks, and the kernels' parameters.

Letters: B batch, H heads, P headdim, G groups of B and C, N dstate, I = H P + 2 G N, W width, S steps in conv_state.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec
from mamba_ssm.ops._shared.spec import fill as fill_fields
from mamba_ssm.ops.causal_conv1d.arguments import check_conv_state, check_weight
from mamba_ssm.ops.ssd.arguments import check_head

NAME = "mamba2_step"
_STATE = "batch head dim dstate"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; the states are written in place."""

    zxbcdt: Annotated[torch.Tensor, Arg("activation", "B, 2 H P + 2 G N + H", "batch -", field="zxBCdt", code="dtype")]
    conv_state: Annotated[torch.Tensor, Arg("", "B, I, S", "batch dim len", code="conv_state_dtype")]
    ssm_state: Annotated[torch.Tensor, Arg("float", "B, H, P, N", _STATE, field="state", code="state_dtype")]
    conv1d_weight: Annotated[torch.Tensor, Arg("", "I, W", field="conv_weight", code="conv_weight_dtype")]
    conv1d_bias: Annotated[torch.Tensor | None, Arg("", "I", field="conv_bias", code="conv_bias_dtype")]
    dt_bias: Annotated[torch.Tensor, Arg("float", "H", code="dt_bias_dtype")]
    A_log: Annotated[torch.Tensor, Arg("float", "H", code="A_log_dtype")]
    D: Annotated[torch.Tensor, Arg("float", "H | H, P", code="D_dtype")]
    rmsnorm_weight: Annotated[torch.Tensor | None, Arg("float", "H P", field="norm_weight", code="norm_weight_dtype")]


class Results(typing.NamedTuple):
    out: Annotated[torch.Tensor, Arg("", "B, H P", "batch -")]


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


SPEC = Spec(NAME, Inputs)


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    sizes, zxbcdt, ngroups = SPEC.bind(inputs), inputs.zxbcdt, options.ngroups
    batch, nheads, headdim, dstate = (sizes[letter] for letter in "BHPN")
    checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    check_head(NAME, headdim, dstate)
    channels = nheads * headdim + 2 * ngroups * dstate
    columns = nheads * headdim + channels + nheads
    if zxbcdt.shape[1] != columns:
        raise ValueError(
            f"{NAME}: zxbcdt must have 2 H P + 2 G N + H = {columns} columns with H = {nheads}, P = {headdim}, "
            f"G = {ngroups}, N = {dstate}, got {zxbcdt.shape[1]}"
        )
    SPEC.check(inputs, sizes | {"G": ngroups})
    checks.check_writable(NAME, "ssm_state", inputs.ssm_state)
    width = check_weight(NAME, zxbcdt, channels, inputs.conv1d_weight, inputs.conv1d_bias, "zxbcdt", "conv1d_")
    state_len = check_conv_state(NAME, inputs.conv_state, batch, channels, width, zxbcdt, "zxbcdt")
    return make(Sizes, (batch, nheads, headdim, ngroups, dstate, state_len, width))


def fill(params, sizes, inputs, options, out):
    """Sets all fields but the run's, from tensors in kernel layout."""
    fill_fields(params, sizes, options, inputs, Results(out))
    D = inputs.D
    params.D_head_stride, params.D_dim_stride = D.stride() if D.dim() == 2 else (1, 0)
    params.norm_eps = options.rmsnorm_eps
