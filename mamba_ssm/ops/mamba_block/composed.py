"""The inside of a Mamba block from one operator after another: for what the single node does not take.

A projection may be a module here, and the scan's output may be had before the output projection, as Mamba's
bidirectional forks want it. Backward keeps the convolution's output, delta, B and C.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import autocast_dtype
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.mamba_block.projections import rms_norm_channels
from mamba_ssm.ops.selective_scan import selective_scan_fn


class Pieces(typing.NamedTuple):
    """What the scan takes, beside A and the parameters of each channel."""

    x: torch.Tensor  # (B, D, L), convolved
    delta: torch.Tensor  # (B, D, L), before its bias
    B: torch.Tensor
    C: torch.Tensor
    z: torch.Tensor  # (B, D, L)


def pieces(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj: torch.Tensor | typing.Callable[[torch.Tensor], torch.Tensor],
    delta_proj_weight: torch.Tensor,
    dstate: int,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    reverse: bool = False,
) -> Pieces:
    """Convolution and projections. Arguments as of mamba_inner_fn; x_proj is a weight, or a module to call."""
    dtype = autocast_dtype(xz)
    xz = xz if dtype is None else checks.cast(xz, dtype)
    x, z = xz.chunk(2, dim=1)
    convolved = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu", reverse=reverse)
    x = typing.cast(torch.Tensor, convolved)
    steps = x.transpose(1, 2)
    x_dbl = F.linear(steps, x_proj) if isinstance(x_proj, torch.Tensor) else x_proj(steps)
    rank = delta_proj_weight.shape[1]
    delta = F.linear(x_dbl[..., :rank], delta_proj_weight).transpose(1, 2)
    if dt_rms_weight is not None:
        delta = rms_norm_channels(delta, dt_rms_weight, eps)

    def variable(rows, bias, rms_weight):
        matrix = rows.transpose(1, 2)
        if bias is not None:
            matrix = matrix + bias.to(matrix.dtype)[:, None]
        return matrix if rms_weight is None else rms_norm_channels(matrix, rms_weight, eps)

    if B is None:
        B = variable(x_dbl[..., rank : rank + dstate], B_proj_bias, b_rms_weight)
    if C is None:
        C = variable(x_dbl[..., x_dbl.shape[-1] - dstate :], C_proj_bias, c_rms_weight)
    return Pieces(x, delta, B, C, z)


def scan(
    given: Pieces,
    A: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    reverse: bool = False,
) -> torch.Tensor:
    """The gated scan, (B, D, L)."""
    x, delta, B, C, z = given
    x, z = x.to(delta.dtype), z.to(delta.dtype)
    y = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus, reverse=reverse)
    return typing.cast(torch.Tensor, y)


def project_out(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The output projection of y (B, L, D), whose bias may have another dtype."""
    return F.linear(y, weight, None if bias is None else bias.to(y.dtype))


def mamba_inner_fn_no_out_proj(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    *,
    reverse: bool = False,
) -> torch.Tensor:
    """mamba_inner_fn before its output projection: (B, D, L), of Vision Mamba's and its descendants' mamba_ssm. With
    reverse (an addition) as of flipped xz, flipped back.
    """
    of_BC = B, C, B_proj_bias, C_proj_bias
    given = pieces(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A.shape[-1], *of_BC, reverse=reverse
    )
    return scan(given, A, D, delta_bias, delta_softplus, reverse)


def bimamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    A_b: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
) -> torch.Tensor:
    """mamba_inner_fn whose scan also runs backwards in time, with A_b (D, N) for A; both share everything else. The
    sum of the two is projected: (B, L, d_model). Of Vision Mamba's mamba_ssm (bimamba_type="v1").
    """
    given = pieces(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A.shape[-1], B, C, B_proj_bias, C_proj_bias
    )
    y = scan(given, A, D, delta_bias, delta_softplus)
    y = y + scan(given, A_b, D, delta_bias, delta_softplus, reverse=True)
    return project_out(y.transpose(1, 2), out_proj_weight, out_proj_bias)
