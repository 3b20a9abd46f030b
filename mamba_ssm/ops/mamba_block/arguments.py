"""What the operators of a Mamba block's inside share: arguments as records, checks, and delta, B and C from x_dbl.

x_dbl (R + N + N, B*L) is x_proj's product, without the N rows of a B or C that is given.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import View
from mamba_ssm.ops.causal_conv1d.arguments import Inputs as ConvInputs
from mamba_ssm.ops.causal_conv1d.arguments import Options as ConvOptions
from mamba_ssm.ops.causal_conv1d.arguments import Sizes as ConvSizes
from mamba_ssm.ops.causal_conv1d.arguments import check_width
from mamba_ssm.ops.causal_conv1d.forward import launch_forward as launch_convolution
from mamba_ssm.ops.mamba_block.projections import from_columns, rms_norm_channels, to_channel_major, to_columns
from mamba_ssm.ops.selective_scan.arguments import Inputs as ScanInputs
from mamba_ssm.ops.selective_scan.arguments import Options as ScanOptions
from mamba_ssm.ops.selective_scan.arguments import Sizes as ScanSizes
from mamba_ssm.ops.selective_scan.arguments import check_matrix, check_parameters

NAME = "mamba_inner_fn"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

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


class Options(typing.NamedTuple):
    """What else both operators take, in their order."""

    delta_softplus: bool
    rms_eps: float
    checkpoint_lvl: int  # 1: backward computes the convolution's output and delta again; 0: they are kept
    reverse: bool = False  # convolution and scan go from the last step to the first

    @property
    def conv1d(self):
        """As the convolution's launchers take them."""
        return ConvOptions(True, self.reverse)

    @property
    def scan(self):
        """As the scan's launchers take them."""
        return ScanOptions(self.delta_softplus, self.reverse)


class Kept(typing.NamedTuple):
    """What backward starts from, beside the inputs; None where not wanted. All but checkpoints are matrices."""

    x_dbl: torch.Tensor | None  # (R + N + N, B*L)
    checkpoints: torch.Tensor | None  # the scan's
    conv_out: torch.Tensor | None  # (D, B*L)
    delta: torch.Tensor | None  # (D, B*L), before bias and softplus


class Before(typing.NamedTuple):
    """What a part of a sequence starts from; None where nothing comes before."""

    inputs: torch.Tensor | None  # of the convolution, (B, D, W-1)
    state: torch.Tensor | None  # (B, D N)


class Source(typing.NamedTuple):
    """Where B or C comes from: given, or rows of x_dbl, with a bias and a norm."""

    given: torch.Tensor | None
    proj_bias: torch.Tensor | None
    rms_weight: torch.Tensor | None
    first: int  # of the rows of x_dbl, if it is not given

    @property
    def plain(self):
        """Whether rows of x_dbl are the matrix."""
        return self.given is None and self.proj_bias is None and self.rms_weight is None


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    dstate: int
    ngroups: int
    rank: int
    width: int  # of the convolution
    d_model: int

    @property
    def columns(self):
        return self.batch * self.seqlen

    @property
    def conv1d(self):
        """As the convolution's launchers take them."""
        return ConvSizes(self.batch, self.dim, self.seqlen, self.width)

    @property
    def scan(self):
        """As the scan's launchers take them."""
        return ScanSizes(self.batch, self.dim, self.seqlen, self.dstate, self.ngroups)


def check(inputs):
    """Raises on tensors that do not fit; returns the sizes."""
    xz, A, B, C = inputs.xz, inputs.A, inputs.B, inputs.C
    conv1d_weight, conv1d_bias = inputs.conv1d_weight, inputs.conv1d_bias
    x_proj_weight, delta_proj_weight = inputs.x_proj_weight, inputs.delta_proj_weight
    out_proj_weight, out_proj_bias = inputs.out_proj_weight, inputs.out_proj_bias
    checks.check_dims(NAME, "xz", xz, 3, "(B, 2D, L)")
    checks.check_activation_dtype(NAME, "xz", xz)
    checks.check_dims(NAME, "A", A, 2, "(D, N)")
    dim, dstate = A.shape
    batch, _, seqlen = xz.shape
    checks.check_same(NAME, "xz", xz, (batch, 2 * dim, seqlen), xz, "itself", "(B, 2D, L) with A (D, N)")
    check_parameters(NAME, (dim, dstate), xz, "xz", inputs)
    checks.check_dims(NAME, "conv1d_weight", conv1d_weight, 3, "(D, 1, W)")
    width = conv1d_weight.shape[2]
    checks.check_float(NAME, "conv1d_weight", conv1d_weight, (dim, 1, width), xz, "xz", "(D, 1, W)")
    check_width(NAME, width, "conv1d_")
    if conv1d_bias is not None:
        checks.check_float(NAME, "conv1d_bias", conv1d_bias, (dim,), xz, "xz", "(D,)")
    checks.check_dims(NAME, "delta_proj_weight", delta_proj_weight, 2, "(D, R)")
    rank = delta_proj_weight.shape[1]
    checks.check_same(NAME, "delta_proj_weight", delta_proj_weight, (dim, rank), xz, "xz", "(D, R)")
    rows = rank + (dstate if B is None else 0) + (dstate if C is None else 0)
    letters = "(R, and N for each of B and C that is not given, D)"
    checks.check_tensor(NAME, "x_proj_weight", x_proj_weight)
    checks.check_same(NAME, "x_proj_weight", x_proj_weight, (rows, dim), xz, "xz", letters)
    checks.check_dims(NAME, "out_proj_weight", out_proj_weight, 2, "(d_model, D)")
    d_model = out_proj_weight.shape[0]
    checks.check_same(NAME, "out_proj_weight", out_proj_weight, (d_model, dim), xz, "xz", "(d_model, D)")
    if out_proj_bias is not None:
        checks.check_tensor(NAME, "out_proj_bias", out_proj_bias)
        checks.check_same(NAME, "out_proj_bias", out_proj_bias, (d_model,), xz, "xz", "(d_model,)")
    ngroups = 1
    for name, matrix in (("B", B), ("C", C)):
        if matrix is not None:
            checks.check_tensor(NAME, name, matrix)
            ngroups = matrix.shape[1] if matrix.dim() == 4 else ngroups
    if ngroups != 1:
        checks.check_groups(NAME, "dim (channels of x)", dim, ngroups)
    for name, matrix in (("B", B), ("C", C)):
        if matrix is not None:
            check_matrix(NAME, name, matrix, (batch, ngroups, dstate, seqlen), xz, "xz", dim)
        elif ngroups != 1:
            raise ValueError(f"{NAME}: {name} from x_proj has one group, but the other matrix has {ngroups}")
    for name, vector, matrix in (
        ("B_proj_bias", inputs.B_proj_bias, B),
        ("C_proj_bias", inputs.C_proj_bias, C),
        ("b_rms_weight", inputs.b_rms_weight, B),
        ("c_rms_weight", inputs.c_rms_weight, C),
    ):
        if vector is not None:
            checks.check_tensor(NAME, name, vector)
            if matrix is not None:
                raise ValueError(f"{NAME}: {name} is for what x_proj gives, but {name[0].upper()} is given")
            checks.check_float(NAME, name, vector, (dstate,), xz, "xz", "(N,)")
    if inputs.dt_rms_weight is not None:
        checks.check_tensor(NAME, "dt_rms_weight", inputs.dt_rms_weight)
        checks.check_float(NAME, "dt_rms_weight", inputs.dt_rms_weight, (dim,), xz, "xz", "(D,)")
    return Sizes(batch, dim, seqlen, dstate, ngroups, rank, width, d_model)


def sources(inputs, sizes):
    """Of B and of C."""
    rank = sizes.rank
    first_of_C = rank + sizes.dstate if inputs.B is None else rank
    return (
        Source(inputs.B, inputs.B_proj_bias, inputs.b_rms_weight, rank),
        Source(inputs.C, inputs.C_proj_bias, inputs.c_rms_weight, first_of_C),
    )


# ---- what both directions compute ------------------------------------------------------------------------------------


def channels(matrix, sizes, first=0):
    """Rows of a matrix (..., B*L), from the first on, as kernels take (B, D, L)."""
    return View(matrix, first * sizes.columns, sizes.seqlen, sizes.columns, 1)


def channel_major(xz, sizes):
    """to_channel_major where strides can be looked at: most tensors lie so already."""
    return xz if xz.stride() == (sizes.seqlen, sizes.columns, 1) else to_channel_major(xz)


def conv_inputs(xz, inputs, sizes):
    """As the convolution's launchers take them. xz, in memory (2D, B, L), must outlive them: x is a View of it."""
    weight, bias = inputs.conv1d_weight.contiguous(), checks.contiguous(inputs.conv1d_bias)
    return ConvInputs(channels(xz, sizes), weight, bias, seq_idx=None, initial_states=None)


def convolve(xz, inputs, sizes, options, before=None):
    """The convolution's output (D, B*L). xz: in memory (2D, B, L); before: None, or inputs before it (B, D, W-1)."""
    out = xz.new_empty((sizes.dim, sizes.columns))
    if sizes.columns == 0:
        return out
    conv = conv_inputs(xz, inputs, sizes)
    launch_convolution(sizes.conv1d, conv, options.conv1d, channels(out, sizes), None)
    if before is not None:
        # as if nothing came before, which the kernels do faster, and then the first steps again, from what does
        conv = conv._replace(initial_states=before)
        launch_convolution(first_steps(sizes), conv, options.conv1d, channels(out, sizes), None)
    return out


def first_steps(sizes):
    """The convolution's sizes, of the steps that see inputs before the part."""
    return sizes.conv1d._replace(seqlen=min(sizes.width - 1, sizes.seqlen))


def delta_of(x_dbl, inputs, sizes, eps):
    """delta as the scan takes it, as a matrix (D, B*L)."""
    delta = torch.mm(inputs.delta_proj_weight, x_dbl[: sizes.rank])
    if inputs.dt_rms_weight is None:
        return delta
    return to_columns(rms_norm_channels(from_columns(delta, sizes.batch, sizes.seqlen), inputs.dt_rms_weight, eps))


def matrix_of(source, x_dbl, sizes, eps, view=True):
    """B or C as the scan takes it, as a View if possible and wanted; and what its norm took, (B, N, L)."""
    given, proj_bias, rms_weight, first = source
    if given is not None:
        return checks.unit_last_stride(given) if given.dim() > 2 else given.contiguous(), None
    if view and source.plain:
        return channels(x_dbl, sizes, first), None
    biased = from_columns(x_dbl[first : first + sizes.dstate], sizes.batch, sizes.seqlen)
    if proj_bias is not None:
        biased = biased + proj_bias.to(x_dbl.dtype)[:, None]
    matrix = biased if rms_weight is None else rms_norm_channels(biased, rms_weight, eps)
    return checks.unit_last_stride(matrix), biased


def scan_inputs(conv_out, delta, B, C, xz, inputs, sizes, state=None):
    """As the scan's launchers take them; conv_out, delta and xz must outlive them, of which they hold Views. state:
    before the first step, (B, D, N).
    """
    A, D, delta_bias = (checks.contiguous(tensor) for tensor in (inputs.A, inputs.D, inputs.delta_bias))
    x, z = channels(conv_out, sizes), channels(xz, sizes, sizes.dim)
    return ScanInputs(x, channels(delta, sizes), A, B, C, D, z, delta_bias, state, None)
