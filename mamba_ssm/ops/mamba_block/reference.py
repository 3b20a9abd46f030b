"""The inside of a Mamba block in plain torch: readable, differentiable any number of times; what tests compare with."""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.causal_conv1d import causal_conv1d_ref
from mamba_ssm.ops.mamba_block.arguments import NAME
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype."""
    dtype = working_dtype(x)
    wide = x.to(dtype)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.to(dtype)).to(x.dtype)


def mamba_inner_ref(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    reverse: bool = False,
) -> torch.Tensor:
    """Conv, projections, scan, gate and output projection of a Mamba block; arguments as mamba_inner_fn.

    checkpoint_lvl has no effect here: everything is kept.
    """
    checks.no_complex(NAME, "A", A)
    weights = {"x_proj_weight": x_proj_weight, "delta_proj_weight": delta_proj_weight}
    checks.check_devices(NAME, "xz", xz, **weights, out_proj_weight=out_proj_weight)
    delta_rank, dstate = delta_proj_weight.shape[1], A.shape[-1]
    x, z = xz.chunk(2, dim=1)
    convolved = causal_conv1d_ref(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu", reverse=reverse)
    x = typing.cast(torch.Tensor, convolved)
    x_dbl = F.linear(x.transpose(1, 2), x_proj_weight)
    delta = F.linear(x_dbl[..., :delta_rank], delta_proj_weight)
    if dt_rms_weight is not None:
        delta = rms_norm_ref(delta, dt_rms_weight, b_c_dt_rms_eps)

    def variable(matrix, bias, rms_weight):
        if bias is not None:
            matrix = matrix + bias.to(matrix.dtype)
        if rms_weight is not None:
            matrix = rms_norm_ref(matrix, rms_weight, b_c_dt_rms_eps)
        return matrix.transpose(1, 2)

    if B is None:
        B = variable(x_dbl[..., delta_rank : delta_rank + dstate], B_proj_bias, b_rms_weight)
    if C is None:
        C = variable(x_dbl[..., x_dbl.shape[-1] - dstate :], C_proj_bias, c_rms_weight)
    y = selective_scan_ref(x, delta.transpose(1, 2), A, B, C, D, z, delta_bias, delta_softplus, reverse=reverse)
    return F.linear(typing.cast(torch.Tensor, y).transpose(1, 2), out_proj_weight, out_proj_bias)
