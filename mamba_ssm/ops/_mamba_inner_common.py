"""What mamba_inner_fn's forward and backward share: its tensors, checks, and delta, B and C from the rows of x_dbl.

x_dbl (R + N + N, B*L) is x_proj's product, without the N rows of a B or C that is given.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch

from mamba_ssm.ops import _checks as checks
from mamba_ssm.ops._projections import from_columns, rms_norm_channels

_NAME = "mamba_inner_fn"


class Inputs(typing.NamedTuple):
    """The tensors of mamba_inner_fn, in the order in which the autograd node and the backward operator take them."""

    xz: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    x_proj_weight: torch.Tensor
    delta_proj_weight: torch.Tensor
    out_proj_weight: torch.Tensor
    out_proj_bias: torch.Tensor | None
    A: torch.Tensor
    B: torch.Tensor | None
    C: torch.Tensor | None
    D: torch.Tensor | None
    delta_bias: torch.Tensor | None
    B_proj_bias: torch.Tensor | None
    C_proj_bias: torch.Tensor | None
    b_rms_weight: torch.Tensor | None
    c_rms_weight: torch.Tensor | None
    dt_rms_weight: torch.Tensor | None


def check(inputs):
    """Raises on tensors that do not fit; what the convolution and the scan check themselves is left to them."""
    xz, conv1d_weight, _, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, *_ = inputs
    checks.check_dims(_NAME, "xz", xz, 3, "(B, 2D, L)")
    checks.check_activation_dtype(_NAME, "xz", xz)
    checks.check_dims(_NAME, "A", A, 2, "(D, N)")
    checks.no_complex(_NAME, "A", A)
    dim, dstate = A.shape
    batch, _, seqlen = xz.shape
    checks.check_same(_NAME, "xz", xz, (batch, 2 * dim, seqlen), xz, "itself", "(B, 2D, L) with A (D, N)")
    checks.check_dims(_NAME, "conv1d_weight", conv1d_weight, 3, "(D, 1, W)")
    width = conv1d_weight.shape[2]
    checks.check_float(_NAME, "conv1d_weight", conv1d_weight, (dim, 1, width), xz, "xz", "(D, 1, W)")
    checks.check_dims(_NAME, "delta_proj_weight", delta_proj_weight, 2, "(D, R)")
    rank = delta_proj_weight.shape[1]
    checks.check_same(_NAME, "delta_proj_weight", delta_proj_weight, (dim, rank), xz, "xz", "(D, R)")
    rows = rank + (dstate if B is None else 0) + (dstate if C is None else 0)
    letters = "(R, and N for each of B and C that is not given, D)"
    checks.check_tensor(_NAME, "x_proj_weight", x_proj_weight)
    checks.check_same(_NAME, "x_proj_weight", x_proj_weight, (rows, dim), xz, "xz", letters)
    checks.check_dims(_NAME, "out_proj_weight", out_proj_weight, 2, "(d_model, D)")
    d_model = out_proj_weight.shape[0]
    checks.check_same(_NAME, "out_proj_weight", out_proj_weight, (d_model, dim), xz, "xz", "(d_model, D)")
    if out_proj_bias is not None:
        checks.check_tensor(_NAME, "out_proj_bias", out_proj_bias)
        checks.check_same(_NAME, "out_proj_bias", out_proj_bias, (d_model,), xz, "xz", "(d_model,)")
    for name, vector, matrix in (
        ("B_proj_bias", inputs.B_proj_bias, B),
        ("C_proj_bias", inputs.C_proj_bias, C),
        ("b_rms_weight", inputs.b_rms_weight, B),
        ("c_rms_weight", inputs.c_rms_weight, C),
    ):
        if vector is not None:
            checks.check_tensor(_NAME, name, vector)
            if matrix is not None:
                raise ValueError(f"{_NAME}: {name} is for what x_proj gives, but {name[0].upper()} is given")
            checks.check_float(_NAME, name, vector, (dstate,), xz, "xz", "(N,)")
    if inputs.dt_rms_weight is not None:
        checks.check_tensor(_NAME, "dt_rms_weight", inputs.dt_rms_weight)
        checks.check_float(_NAME, "dt_rms_weight", inputs.dt_rms_weight, (dim,), xz, "xz", "(D,)")


def split(x_dbl, rank, dstate, B, C):
    """The rows of x_dbl that are dt (R), B (N) and C (N), before bias and norm; None for one that is given."""
    dt, *matrices = x_dbl.split_with_sizes([rank, *[dstate] * ((B is None) + (C is None))])
    return dt, matrices[0] if B is None else None, matrices[-1] if C is None else None


def delta_of(dt, batch, seqlen, delta_proj_weight, dt_rms_weight, eps):
    """delta (B, D, L) as the scan takes it, and what its norm took."""
    projected = from_columns(torch.mm(delta_proj_weight, dt), batch, seqlen)
    delta = projected if dt_rms_weight is None else rms_norm_channels(projected, dt_rms_weight, eps)
    return delta, projected


def matrix_of(rows, batch, seqlen, given, proj_bias, rms_weight, eps):
    """B or C as the scan takes it, and what its norm took."""
    if rows is None:
        return given, None
    biased = from_columns(rows, batch, seqlen)
    if proj_bias is not None:
        biased = biased + proj_bias.to(rows.dtype)[:, None]
    return biased if rms_weight is None else rms_norm_channels(biased, rms_weight, eps), biased
