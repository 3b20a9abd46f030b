"""What the operators from a Mamba-3 layer's in_proj to its out_proj share: their arguments as records, checks, and the
parts of tensors, which go to the kernels as addresses.

Letters: B batch, L length, R rank, H heads, P headdim, G groups of B and C, N dstate, S angles, U sequences (B, or
those that cu_seqlens bounds).
"""

import itertools
import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, View, place, run
from mamba_ssm._torch import make
from mamba_ssm.ops.mamba3_block.arguments import Sizes as LayerSizes
from mamba_ssm.ops.mamba3_block.arguments import check_angles, check_rank, parameter_shapes
from mamba_ssm.ops.mamba3_scan.arguments import Inputs as ScanInputs
from mamba_ssm.ops.mamba3_scan.arguments import Options as ScanOptions
from mamba_ssm.ops.mamba3_scan.arguments import Sizes as ScanSizes
from mamba_ssm.ops.mamba3_scan.arguments import check_packing, check_states
from mamba_ssm.ops.norm.arguments import in_rows
from mamba_ssm.ops.ssd.arguments import check_head

NAME = "mamba3_block"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    zxBCdt: torch.Tensor  # (B, L, 2 H P + 2 R G N + 3 H + S)
    dt_bias: torch.Tensor  # (H), float32 like all parameters but the norms' weights of B and C
    B_weight: torch.Tensor  # (N)
    C_weight: torch.Tensor  # (N)
    B_bias: torch.Tensor  # (H, R, N)
    C_bias: torch.Tensor  # (H, R, N)
    D: torch.Tensor | None  # (H)
    mimo_x: torch.Tensor | None  # (H, R, P)
    mimo_z: torch.Tensor | None  # (H, R, P)
    mimo_o: torch.Tensor | None  # (H, R, P)
    norm_weight: torch.Tensor | None  # (H P)
    angle_state: torch.Tensor | None  # (U, H, S), float32 like the others; all four or none
    ssm_state: torch.Tensor | None  # (U, H, P, N)
    k_state: torch.Tensor | None  # (U, R, H, N)
    v_state: torch.Tensor | None  # (U, H, P)
    seq_idx: torch.Tensor | None  # (B, L)
    cu_seqlens: torch.Tensor | None  # (U + 1)


class Options(typing.NamedTuple):
    """What else the operators take, in their order."""

    headdim: int
    ngroups: int
    A_floor: float
    A_softplus: bool
    B_eps: float
    C_eps: float
    norm_eps: float
    gate: bool
    pairwise: bool

    @property
    def scan(self):
        """As the scan's launchers take them."""
        return make(ScanOptions, (self.pairwise, self.norm_eps))


class Sizes(typing.NamedTuple):
    layer: LayerSizes
    scan: ScanSizes

    @property
    def parts(self):
        """Where z, x, B, C, dt, A, trap and angles begin among the columns of zxBCdt."""
        return itertools.accumulate(self.layer.columns[:-1], initial=0)


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    zxBCdt, headdim, ngroups = inputs.zxBCdt, options.headdim, options.ngroups
    checks.check_dims(NAME, "zxBCdt", zxBCdt, 3, "(B, L, 2 H P + 2 R G N + 3 H + S)")
    checks.check_activation_dtype(NAME, "zxBCdt", zxBCdt)
    checks.check_dims(NAME, "B_bias", inputs.B_bias, 3, "(H, R, N)")
    (batch, seqlen, columns), (nheads, rank, dstate) = zxBCdt.shape, inputs.B_bias.shape
    checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    check_head(NAME, headdim, dstate)
    check_rank(NAME, rank)
    nangles = columns - 2 * nheads * headdim - 2 * rank * ngroups * dstate - 3 * nheads
    if nangles < 0:
        raise ValueError(
            f"{NAME}: zxBCdt must have 2 H P + 2 R G N + 3 H + S columns, {columns - nangles} without the S angles "
            f"with H = {nheads}, P = {headdim}, R = {rank}, G = {ngroups}, N = {dstate}, got {columns}"
        )
    check_angles(NAME, nangles, dstate)
    layer = make(LayerSizes, (batch, rank, nheads, headdim, ngroups, dstate, nangles))
    for name, (shape, letters) in parameter_shapes(layer).items():
        tensor = getattr(inputs, name)
        if tensor is not None:
            check_parameter = checks.check_float if name in ("B_weight", "C_weight") else checks.check_float32
            check_parameter(NAME, name, tensor, shape, zxBCdt, "zxBCdt", letters)
    sequences = check_packing(NAME, zxBCdt, "zxBCdt", inputs)
    scan = make(ScanSizes, (batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles, sequences))
    check_states(NAME, zxBCdt, "zxBCdt", inputs, scan)
    return make(Sizes, (layer, scan))


def kernel_layout(inputs):
    """The inputs as the kernels take them, and the stride of zxBCdt's rows; all else contiguous."""
    zxBCdt, row_stride = in_rows(inputs.zxBCdt)
    return make(Inputs, (zxBCdt, *map(checks.contiguous, inputs[1:]))), row_stride


def out_shape(sizes, inputs):
    """(B, L, H, P), without mimo_o (B, L, R, H, P)."""
    scan = sizes.scan
    rows = () if inputs.mimo_o is not None else (scan.rank,)
    return scan.batch, scan.seqlen, *rows, scan.nheads, scan.headdim


def new_zxBCdt_like(inputs):
    """Memory for its gradient; zero where packed sequences may leave steps out at the end."""
    make_new = torch.empty_like if inputs.cu_seqlens is None else torch.zeros_like
    return make_new(inputs.zxBCdt, memory_format=torch.contiguous_format)


class Parts(typing.NamedTuple):
    """zxBCdt or its gradient, cut as the scan takes it; B, C, dt and A are addresses."""

    z: View
    x: View
    B: int
    C: int
    dt: int
    A: int
    trap: View
    angles: View


def cut(zxBCdt, row_stride, sizes):
    """The Parts of a tensor with rows at this stride. They must not outlive it."""
    steps = sizes.scan.seqlen * row_stride, row_stride
    z, x, B, C, dt, A, trap, angles = sizes.parts
    headdim, first, element = sizes.scan.headdim, zxBCdt.data_ptr(), zxBCdt.element_size()
    heads = View(zxBCdt, z, *steps, headdim, 1), View(zxBCdt, x, *steps, headdim, 1)
    addresses = [first + begin * element for begin in (B, C, dt, A)]
    return make(Parts, (*heads, *addresses, View(zxBCdt, trap, *steps, 1), View(zxBCdt, angles, *steps, 1)))


# ---- what the scan takes, of zxBCdt ----------------------------------------------------------------------------------


class Prepared(typing.NamedTuple):
    """B and C normed, and the steps, or the gradients of these."""

    C: torch.Tensor  # (B, L, R, G, N), of zxBCdt's dtype
    B: torch.Tensor
    ADT: torch.Tensor  # (B, L, H), float32
    DT: torch.Tensor


def new_prepared(sizes, make_new):
    """Memory for them, by zxBCdt.new_empty or .new_zeros."""
    scan = sizes.scan
    matrix = scan.batch, scan.seqlen, scan.rank, scan.ngroups, scan.dstate
    C, B = make_new(matrix), make_new(matrix)
    ADT, DT = (make_new((*matrix[:2], scan.nheads), dtype=torch.float32) for _ in range(2))
    return make(Prepared, (C, B, ADT, DT))


def fill(params, sizes, inputs, options, parts, row_stride):
    """Sets the fields that both directions of the preparation share."""
    scan = sizes.scan
    params.rows = scan.batch * scan.seqlen
    params.matrices, params.dstate, params.nheads = scan.rank * scan.ngroups, scan.dstate, scan.nheads
    params.dtype = DTYPE_CODES[inputs.zxBCdt.dtype]
    params.q_weight_dtype = DTYPE_CODES[inputs.C_weight.dtype]
    params.k_weight_dtype = DTYPE_CODES[inputs.B_weight.dtype]
    params.A_softplus = options.A_softplus
    params.A_floor = options.A_floor
    params.q_eps, params.k_eps = options.C_eps, options.B_eps
    params.q, params.k, params.dt, params.a = parts.C, parts.B, parts.dt, parts.A
    params.q_weight, params.k_weight = inputs.C_weight.data_ptr(), inputs.B_weight.data_ptr()
    params.dt_bias = inputs.dt_bias.data_ptr()
    params.row_stride = row_stride


def prepare(sizes, inputs, options, parts, row_stride):
    """Prepared, by the kernel."""
    prepared = new_prepared(sizes, inputs.zxBCdt.new_empty)
    params = abi.MambaMamba3Inputs()
    functions = place(params, inputs.zxBCdt)
    fill(params, sizes, inputs, options, parts, row_stride)
    params.q_out, params.k_out, params.adt_out, params.dt_out = (tensor.data_ptr() for tensor in prepared)
    run(functions, "mamba3_inputs_forward", params)
    return prepared


def scan_inputs(inputs, options, parts, prepared):
    """As the scan's launchers take them. zxBCdt must outlive them."""
    tensors = prepared.C, prepared.B, parts.x, prepared.ADT, prepared.DT, parts.trap, inputs.C_bias, inputs.B_bias
    z = parts.z if options.gate else None
    projections = inputs.mimo_x, inputs.mimo_z, inputs.mimo_o
    return make(ScanInputs, (*tensors, parts.angles, inputs.D, z, *projections, *inputs[10:]))
