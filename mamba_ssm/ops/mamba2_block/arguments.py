"""What the operators of a Mamba-2 block's inside share: their arguments as records, checks, and the parts of tensors.

The parts go to the kernels as addresses, and arguments are checked once, not by each part's operator: in a small block
that is half of the time.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native.launch import View
from mamba_ssm._torch import make
from mamba_ssm.ops.causal_conv1d.arguments import Inputs as ConvInputs
from mamba_ssm.ops.causal_conv1d.arguments import Options as ConvOptions
from mamba_ssm.ops.causal_conv1d.arguments import Sizes as ConvSizes
from mamba_ssm.ops.causal_conv1d.arguments import check_weight, in_order
from mamba_ssm.ops.causal_conv1d.forward import launch_forward as launch_convolution
from mamba_ssm.ops.norm.arguments import in_rows
from mamba_ssm.ops.norm.gated_arguments import Options as NormOptions
from mamba_ssm.ops.ssd.arguments import Inputs as ScanInputs
from mamba_ssm.ops.ssd.arguments import check_head, check_parameters

NAME = "mamba_split_conv1d_scan_combined"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    zxbcdt: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    dt_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor | None
    initial_states: torch.Tensor | None
    seq_idx: torch.Tensor | None
    rmsnorm_weight: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operators take, in their order."""

    headdim: int
    ngroups: int
    dt_min: float
    dt_max: float
    silu: bool
    rmsnorm_eps: float
    norm_before_gate: bool
    A_is_log: bool  # A is a layer's A_log = log(-A); it and dt_bias may be float16 or bfloat16 too; dA is A_log's
    reverse: bool = False  # convolution and scan go from the last step to the first

    @property
    def conv1d(self):
        """As the convolution's launchers take them."""
        return ConvOptions(self.silu, self.reverse)

    @property
    def dt_softplus(self) -> bool:
        """Always: the scan's launchers take these options for theirs."""
        return True


class Kept(typing.NamedTuple):
    """What forward keeps for backward where there is a norm, else None."""

    y: torch.Tensor | None  # the scan's output (B, L, H P)
    rstd: torch.Tensor | None  # 1 / rms of each group (B, L, G) float32


class Sizes(typing.NamedTuple):
    """The scan's launchers take these sizes for theirs."""

    batch: int
    seqlen: int
    d_mlp: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    dim: int  # channels of the scan, H P
    channels: int  # of the convolution, H P + 2 G N
    width: int  # of the convolution

    @property
    def empty(self):
        """Whether there is nothing to convolve and to scan."""
        return self.batch * self.seqlen * self.nheads == 0

    @property
    def states(self):
        """Shape of the scan's states before or after a step."""
        return self.batch, self.nheads, self.headdim, self.dstate

    @property
    def rows(self):
        """As the norm's launchers take them."""
        return self.batch * self.seqlen

    @property
    def conv1d(self):
        """As the convolution's launchers take them."""
        return ConvSizes(self.batch, self.channels, self.seqlen, self.width)


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    zxbcdt, A, conv1d_weight = inputs.zxbcdt, inputs.A, inputs.conv1d_weight
    headdim, ngroups = options.headdim, options.ngroups
    if zxbcdt.dim() != 3 or A.dim() != 1 or conv1d_weight.dim() != 2 or zxbcdt.dtype not in checks.FLOAT_DTYPES:
        checks.check_dims(NAME, "zxbcdt", zxbcdt, 3, "(B, L, 2 d_mlp + 2 H P + 2 G N + H)")
        checks.check_activation_dtype(NAME, "zxbcdt", zxbcdt)
        checks.check_dims(NAME, "A_log" if options.A_is_log else "A", A, 1, "(H,)")
        checks.check_dims(NAME, "conv1d_weight", conv1d_weight, 2, "(H P + 2 G N, W)")
    batch, seqlen, columns = zxbcdt.shape
    nheads, channels = A.shape[0], conv1d_weight.shape[0]
    dim = nheads * headdim
    if ngroups != 1:
        checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    dstate = (channels - dim) // (2 * ngroups)  # not divmod: sizes may be symbols
    if headdim < 1 or dstate < 1 or channels != dim + 2 * ngroups * dstate:
        raise ValueError(
            f"{NAME}: conv1d_weight must have H P + 2 G N rows with H = {nheads}, P = {headdim}, G = {ngroups}, "
            f"got {channels}"
        )
    d_mlp = (columns - dim - channels - nheads) // 2
    if d_mlp < 0 or columns != 2 * d_mlp + dim + channels + nheads:
        raise ValueError(
            f"{NAME}: zxbcdt must have 2 d_mlp + 2 H P + 2 G N + H columns, {dim + channels + nheads} without d_mlp, "
            f"got {columns}"
        )
    width = check_weight(NAME, zxbcdt, channels, conv1d_weight, inputs.conv1d_bias, "zxbcdt", "conv1d_")
    sizes = make(Sizes, (batch, seqlen, d_mlp, nheads, headdim, ngroups, dstate, dim, channels, width))
    check_head(NAME, headdim, dstate)
    check_parameters(NAME, sizes, zxbcdt, "zxbcdt", inputs, options)
    if inputs.rmsnorm_weight is not None:
        checks.check_float(NAME, "rmsnorm_weight", inputs.rmsnorm_weight, (dim,), zxbcdt, "zxbcdt", "(H P,)")
    return sizes


def kernel_layout(inputs, reverse):
    """The inputs as the kernels take them, and the stride of zxbcdt's rows; parameters and states contiguous."""
    if checks.all_contiguous(inputs) and not reverse:
        return inputs, inputs.zxbcdt.shape[2]
    zxbcdt, *others = inputs
    zxbcdt, row_stride = in_rows(zxbcdt)
    inputs = Inputs(zxbcdt, *map(checks.contiguous, others))
    return inputs._replace(seq_idx=in_order(inputs.seq_idx, reverse)), row_stride


# ---- parts of tensors ------------------------------------------------------------------------------------------------


def cut(zxbcdt, row_stride, sizes):
    """z (B, L, H, P), xBC (B, H P + 2 G N, L) and dt (B, L, H) of zxbcdt, or of its gradient."""
    batch_stride = sizes.seqlen * row_stride
    start = 2 * sizes.d_mlp
    z = View(zxbcdt, start, batch_stride, row_stride, sizes.headdim, 1)
    xBC = View(zxbcdt, start + sizes.dim, batch_stride, 1, row_stride)
    return z, xBC, View(zxbcdt, start + sizes.dim + sizes.channels, batch_stride, row_stride, 1)


def cut_xBC(xBC, sizes):
    """x (B, L, H, P), B and C (B, L, G, N) of xBC (B, L, H P + 2 G N), contiguous."""
    row_stride, dim, dstate = sizes.channels, sizes.dim, sizes.dstate
    batch_stride = sizes.seqlen * row_stride
    x = View(xBC, 0, batch_stride, row_stride, sizes.headdim, 1)
    B = View(xBC, dim, batch_stride, row_stride, dstate, 1)
    C = View(xBC, dim + sizes.ngroups * dstate, batch_stride, row_stride, dstate, 1)
    return x, B, C


def channels_first(xBC, sizes):
    """xBC (B, L, H P + 2 G N), contiguous, as (B, H P + 2 G N, L)."""
    return View(xBC, 0, sizes.seqlen * sizes.channels, 1, sizes.channels)


def heads(tensor, sizes, start=0):
    """H P columns of tensor (B, L, columns), contiguous, as (B, L, H, P)."""
    row_stride = tensor.shape[2]
    return View(tensor, start, sizes.seqlen * row_stride, row_stride, sizes.headdim, 1)


def mlp(tensor, sizes):
    """The columns of the gated MLP's input in zxbcdt, or in its gradient."""
    return tensor.narrow(2, 0, 2 * sizes.d_mlp)


# ---- what both directions compute ------------------------------------------------------------------------------------


def norm_options(options, sizes):
    """As the norm's launchers take them."""
    group_size = sizes.dim // sizes.ngroups
    return NormOptions(group_size, options.norm_before_gate, is_rms_norm=True)


def conv_inputs(xBC, inputs):
    """As the convolution's launchers take them. xBC: a View of zxbcdt."""
    return ConvInputs(xBC, inputs.conv1d_weight, inputs.conv1d_bias, inputs.seq_idx, initial_states=None)


def convolve(xBC, inputs, sizes, options):
    """The convolution of a View of zxbcdt, (B, L, H P + 2 G N)."""
    out = inputs.zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.channels))
    launch_convolution(sizes.conv1d, conv_inputs(xBC, inputs), options.conv1d, channels_first(out, sizes), None)
    return out


def scan_inputs(conv_out, dt, z, inputs, sizes):
    """As the scan's launchers take them. conv_out must outlive them: x, B and C are Views of it."""
    x, B, C = cut_xBC(conv_out, sizes)
    A, D, dt_bias = inputs.A, inputs.D, inputs.dt_bias
    return make(ScanInputs, (x, dt, A, B, C, D, z, dt_bias, inputs.initial_states, inputs.seq_idx))
