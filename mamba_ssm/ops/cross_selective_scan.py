"""The selective scan over images, as VMamba has it: along rows and along columns, each forwards and backwards.

Letters: B batch, D channels, H height, W width, L = H W, N dstate, R rank of dt.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._torch import autocast_dtype, reference
from mamba_ssm.ops.selective_scan import selective_scan_fn, selective_scan_ref

__all__ = ["cross_selective_scan", "cross_selective_scan_ref"]

_NAME = "cross_selective_scan"


def cross_selective_scan(
    x: torch.Tensor,
    x_proj_weight: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
) -> torch.Tensor:
    """Four selective scans over an image, added up; differentiable once in every floating-point argument.

    The directions, first dimension of the parameters: row by row, column by column, and both backwards, from the last
    pixel to the first: the order of VMamba's (SS2D's) parameters. One transposed copy of x is made, none is flipped.

    Args:
        x: (B, D, H, W) float32, float16 or bfloat16. Under autocast it and the weights are cast to autocast's dtype.
        x_proj_weight: (4, R + 2N, D) of x's dtype, which gives each direction's dt, B and C. VMamba's x_proj_weight.
        dt_proj_weight: (4, D, R) of x's dtype. VMamba's dt_projs_weight.
        A: (4, D, N) float32 (as every float32 argument, widened if it comes narrower). N is 1..256.
            VMamba's -exp(A_logs), as (4, D, N).
        D: (4, D) float32, the skip connections. VMamba's Ds, as (4, D).
        dt_bias: (4, D) float32, added to dt. VMamba's dt_projs_bias.
        delta_softplus: dt = softplus(dt + dt_bias).

    Returns:
        (B, D, H, W) of x's dtype. What VMamba does before and after (convolution, norm, gate) is left to the caller.

    Raises:
        TypeError: a dtype is wrong, or A is complex. ValueError: a shape or a device is wrong.
        NativeError (a RuntimeError): the kernel library cannot be loaded or does not support this device or dtype.
    """
    if reference.on and not reference.exporting:
        return cross_selective_scan_ref(x, x_proj_weight, dt_proj_weight, A, D, dt_bias, delta_softplus)
    required = {"x": x, "x_proj_weight": x_proj_weight, "dt_proj_weight": dt_proj_weight, "A": A}
    for name, tensor in required.items():
        checks.check_tensor(_NAME, name, tensor)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, x_proj_weight, dt_proj_weight = (checks.cast(tensor, dtype) for tensor in (x, x_proj_weight, dt_proj_weight))
    sizes = _check(x, x_proj_weight, dt_proj_weight, A, D, dt_bias)
    # Taken apart at once: in backward a tensor's gradient is then put together once, not added up from its parts.
    projections = x_proj_weight.unflatten(0, (2, 2)).unbind(1)
    dt_projections, exponents = dt_proj_weight.unbind(), A.unbind()
    skips, biases = ((None,) * 4 if tensor is None else tensor.unbind() for tensor in (D, dt_bias))
    totals = []
    for order, image in enumerate((x, x.transpose(2, 3))):
        line = checks.unit_last_stride(image.flatten(2))
        projected = _project(projections[order].flatten(0, 1), line).split(2 * sizes, dim=1)
        ways = []
        for direction, (dt, B, C) in ((order, projected[:3]), (order + 2, projected[3:])):
            dt = _project(dt_projections[direction], dt)
            given = line, dt, exponents[direction], B, C, skips[direction], None, biases[direction]
            ways.append(typing.cast(torch.Tensor, selective_scan_fn(*given, delta_softplus, reverse=direction > order)))
        forwards, backwards = ways
        totals.append(forwards.add_(backwards).unflatten(2, image.shape[2:]))
    rows, columns = totals
    return rows + columns.transpose(2, 3)


def _project(weight, line):
    """(rows, channels) times (B, channels, L). Not matmul, which copies line if weight requires a gradient."""
    return torch.bmm(weight.expand(line.shape[0], -1, -1), line)


def _check(x, x_proj_weight, dt_proj_weight, A, D, dt_bias):
    """Raises on what does not fit; returns the rows of x_proj_weight for dt, B and C."""
    checks.check_dims(_NAME, "x", x, 4, "(B, D, H, W)")
    checks.check_activation_dtype(_NAME, "x", x)
    checks.check_dims(_NAME, "dt_proj_weight", dt_proj_weight, 3, "(4, D, R)")
    checks.check_dims(_NAME, "A", A, 3, "(4, D, N)")
    dim, rank, dstate = x.shape[1], dt_proj_weight.shape[2], A.shape[2]
    checks.check_dstate(_NAME, dstate, abi.MAX_DSTATE)
    shape = (4, rank + 2 * dstate, dim)
    checks.check_same(_NAME, "x_proj_weight", x_proj_weight, shape, x, "x", "(4, R + 2N, D)")
    checks.check_same(_NAME, "dt_proj_weight", dt_proj_weight, (4, dim, rank), x, "x", "(4, D, R)")
    checks.check_float(_NAME, "A", A, (4, dim, dstate), x, "x", "(4, D, N)")
    for name, tensor in ("D", D), ("dt_bias", dt_bias):
        if tensor is not None:
            checks.check_tensor(_NAME, name, tensor)
            checks.check_float(_NAME, name, tensor, (4, dim), x, "x", "(4, D)")
    return rank, dstate, dstate


def cross_selective_scan_ref(
    x: torch.Tensor,
    x_proj_weight: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
) -> torch.Tensor:
    """cross_selective_scan in plain torch: four copies of the image, flipped and transposed, in one forward scan."""
    checks.no_complex(_NAME, "A", A)
    (dim, height, width), rank, dstate = x.shape[1:], dt_proj_weight.shape[2], A.shape[2]
    orders = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], dim=1)
    lines = torch.cat([orders, orders.flip(-1)], dim=1)  # (B, 4, D, L)
    dt, B, C = torch.einsum("bkdl,kcd->bkcl", lines, x_proj_weight).split([rank, dstate, dstate], dim=2)
    dt = torch.einsum("bkrl,kdr->bkdl", dt, dt_proj_weight)
    skip, bias = (None if tensor is None else tensor.flatten() for tensor in (D, dt_bias))
    y = selective_scan_ref(
        lines.flatten(1, 2), dt.flatten(1, 2), A.flatten(0, 1), B, C, skip, None, bias, delta_softplus
    )
    y = typing.cast(torch.Tensor, y).unflatten(1, (4, dim))
    rows, columns = (y[:, order] + y[:, order + 2].flip(-1) for order in (0, 1))
    return rows.unflatten(2, (height, width)) + columns.unflatten(2, (width, height)).transpose(2, 3)
