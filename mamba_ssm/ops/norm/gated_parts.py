"""The gated norm's two directions by themselves, with upstream's arguments and statistics.

Upstream keeps mean and rstd as one vector, group after group: (groups * rows).
"""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import call
from mamba_ssm.ops.norm.gated import gated_norm_op
from mamba_ssm.ops.norm.gated_arguments import NAME
from mamba_ssm.ops.norm.gated_backward import gated_norm_backward_op


def gated_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """layernorm_fn without a gradient: (out, mean, rstd). mean: None of RMSNorm. out, if given, is written."""
    group_size = x.shape[-1] if group_size is None else group_size
    options = group_size, bool(norm_before_gate), bool(is_rms_norm), True
    with torch.no_grad():
        result, mean, rstd = call(gated_norm_op, x, weight, bias, _beside(z, x), float(eps), *options)
        return checks.into(NAME, "out", out, result), _by_group(mean), _by_group(rstd)


def gated_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    z: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    recompute_output: bool = False,
    dz: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """(dx, dweight, dbias, dz), and with recompute_output the result of the forward direction; None for what is absent.
    mean, rstd: as gated_norm_forward has them. dz, out: written if they are given.
    """
    group_size = x.shape[-1] if group_size is None else group_size
    shape = (*x.shape[:-1], x.shape[-1] // group_size if group_size else 1)
    kept = _by_row(mean, shape), _by_row(rstd, shape)
    options = group_size, bool(norm_before_gate), bool(is_rms_norm)
    with torch.no_grad():
        grads = call(gated_norm_backward_op, dy, x, weight, bias, _beside(z, x), *kept, *options)
        dx, dweight, dbias, gradient = grads
        gradient = checks.into(NAME, "dz", dz, gradient)
        if not recompute_output:
            return dx, dweight, dbias, gradient
        result, _, _ = gated_norm_forward(x, weight, bias, eps, z, out, *options)
        return dx, dweight, dbias, gradient, result


def _beside(z, x):
    """The kernels take z of x's dtype, or float32."""
    return z if z is None or z.dtype == x.dtype else checks.widen(z)


def _by_group(statistic):
    """(..., groups) as (groups * rows)."""
    return None if statistic is None else statistic.flatten(0, -2).t().reshape(-1)


def _by_row(statistic, shape):
    """(groups * rows) as (..., groups)."""
    return None if statistic is None else statistic.view(shape[-1], -1).t().reshape(shape)
