"""What mamba_inner_fn's forward and backward share: its tensors, checks, and delta, B and C from the rows of x_dbl.

x_dbl (R + N + N, B*L) is x_proj's product, without the N rows of a B or C that is given.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch

from mamba_ssm._native.launch import View
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.causal_conv1d.arguments import check_width
from mamba_ssm.ops.causal_conv1d.forward import launch_forward as launch_convolution
from mamba_ssm.ops.mamba_block.projections import from_columns, rms_norm_channels, to_channel_major, to_columns
from mamba_ssm.ops.selective_scan.arguments import check_matrix, check_parameters

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


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    dstate: int
    ngroups: int
    rank: int
    width: int
    C_row: int  # of x_dbl, where C begins, if it is there; B begins at rank

    @property
    def columns(self):
        return self.batch * self.seqlen

    @property
    def conv1d(self):
        """As the convolution's launchers take them."""
        return self.batch, self.dim, self.seqlen, self.width

    @property
    def scan(self):
        """As the scan's launchers take them."""
        return self.batch, self.dim, self.seqlen, self.dstate, self.ngroups


def check(inputs):
    """Raises on tensors that do not fit; returns the sizes."""
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, *_ = (
        inputs
    )
    checks.check_dims(_NAME, "xz", xz, 3, "(B, 2D, L)")
    checks.check_activation_dtype(_NAME, "xz", xz)
    checks.check_dims(_NAME, "A", A, 2, "(D, N)")
    dim, dstate = A.shape
    batch, _, seqlen = xz.shape
    checks.check_same(_NAME, "xz", xz, (batch, 2 * dim, seqlen), xz, "itself", "(B, 2D, L) with A (D, N)")
    check_parameters(_NAME, (dim, dstate), xz, "xz", A, inputs.D, inputs.delta_bias)
    checks.check_dims(_NAME, "conv1d_weight", conv1d_weight, 3, "(D, 1, W)")
    width = conv1d_weight.shape[2]
    checks.check_float(_NAME, "conv1d_weight", conv1d_weight, (dim, 1, width), xz, "xz", "(D, 1, W)")
    check_width(_NAME, width, "conv1d_weight")
    if conv1d_bias is not None:
        checks.check_float(_NAME, "conv1d_bias", conv1d_bias, (dim,), xz, "xz", "(D,)")
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
    ngroups = 1
    for name, matrix in (("B", B), ("C", C)):
        if matrix is not None:
            checks.check_tensor(_NAME, name, matrix)
            ngroups = matrix.shape[1] if matrix.dim() == 4 else ngroups
    if ngroups != 1:
        checks.check_groups(_NAME, "dim (channels of x)", dim, ngroups)
    for name, matrix in (("B", B), ("C", C)):
        if matrix is not None:
            check_matrix(_NAME, name, matrix, (batch, ngroups, dstate, seqlen), xz, "xz", dim)
        elif ngroups != 1:
            raise ValueError(f"{_NAME}: {name} from x_proj has one group, but the other matrix has {ngroups}")
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
    return Sizes(batch, dim, seqlen, dstate, ngroups, rank, width, rank + (dstate if B is None else 0))


def split(x_dbl, rank, dstate, B, C):
    """The rows of x_dbl that are dt (R), B (N) and C (N), before bias and norm; None for one that is given."""
    dt, *matrices = x_dbl.split_with_sizes([rank, *[dstate] * ((B is None) + (C is None))])
    return dt, matrices[0] if B is None else None, matrices[-1] if C is None else None


def delta_of(dt, batch, seqlen, delta_proj_weight, dt_rms_weight, eps):
    """delta as the scan takes it, as a matrix (D, B*L)."""
    delta = torch.mm(delta_proj_weight, dt)
    if dt_rms_weight is None:
        return delta
    return to_columns(rms_norm_channels(from_columns(delta, batch, seqlen), dt_rms_weight, eps))


def matrix_of(rows, batch, seqlen, given, proj_bias, rms_weight, eps):
    """B or C as the scan takes it, and what its norm took."""
    if rows is None:
        return given, None
    biased = from_columns(rows, batch, seqlen)
    if proj_bias is not None:
        biased = biased + proj_bias.to(rows.dtype)[:, None]
    return biased if rms_weight is None else rms_norm_channels(biased, rms_weight, eps), biased


# ---- for kernels -----------------------------------------------------------------------------------------------------


def channels(matrix, sizes, first=0):
    """Rows of a matrix (..., B*L), from the first on, as kernels take (B, D, L)."""
    return View(matrix, first * sizes.columns, sizes.seqlen, sizes.columns, 1)


def channel_major(xz, sizes):
    """to_channel_major where strides can be looked at: most tensors lie so already."""
    return xz if xz.stride() == (sizes.seqlen, sizes.columns, 1) else to_channel_major(xz)


def convolve(xz, inputs, sizes):
    """The convolution's output as a matrix (D, B*L); xz: in memory (2D, B, L)."""
    weight, bias = inputs.conv1d_weight.contiguous(), checks.contiguous(inputs.conv1d_bias)
    out = xz.new_empty((sizes.dim, sizes.columns))
    x = channels(xz, sizes)
    launch_convolution(sizes.conv1d, x, weight, bias, None, None, True, channels(out, sizes), None)
    return out


def scan_matrix(x_dbl, first, sizes, given, proj_bias, rms_weight, eps, view=True):
    """matrix_of for kernels; x_dbl has its rows from the first on. A View if possible and wanted."""
    if view and given is None and proj_bias is None and rms_weight is None:
        return channels(x_dbl, sizes, first), None
    rows = x_dbl[first : first + sizes.dstate] if given is None else None
    matrix, biased = matrix_of(rows, sizes.batch, sizes.seqlen, given, proj_bias, rms_weight, eps)
    return checks.unit_last_stride(matrix) if matrix.dim() > 2 else matrix.contiguous(), biased
