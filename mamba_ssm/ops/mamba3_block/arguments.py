"""A Mamba-3 layer's decoding step: its arguments as records, their checks, and the kernels' parameters.

Letters: B batch, R rank, H heads, P headdim, G groups of B and C, N dstate, S angles.
"""

import itertools
import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, pointer
from mamba_ssm.ops.mamba3_scan.arguments import place_states
from mamba_ssm.ops.ssd.arguments import check_head

NAME = "mamba3_block_step"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; the states are written in place."""

    zxBCdt: torch.Tensor
    angle_state: torch.Tensor
    ssm_state: torch.Tensor
    k_state: torch.Tensor
    v_state: torch.Tensor
    dt_bias: torch.Tensor
    B_weight: torch.Tensor
    C_weight: torch.Tensor
    B_bias: torch.Tensor
    C_bias: torch.Tensor
    D: torch.Tensor | None
    mimo_x: torch.Tensor | None
    mimo_z: torch.Tensor | None
    mimo_o: torch.Tensor | None
    norm_weight: torch.Tensor | None


STATE_NAMES = Inputs._fields[1:5]
_PARAMETERS = "dt_bias", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o"
_WEIGHTS = "B_weight", "C_weight", "norm_weight"


class Options(typing.NamedTuple):
    """What else the operator takes."""

    ngroups: int
    A_floor: float
    A_softplus: bool
    B_eps: float
    C_eps: float
    norm_eps: float
    gate: bool
    pairwise: bool


class Sizes(typing.NamedTuple):
    batch: int
    rank: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    nangles: int

    @property
    def columns(self):
        """Of z, x, B, C, dt, A, trap and angles."""
        channels, matrix = self.nheads * self.headdim, self.rank * self.ngroups * self.dstate
        return channels, channels, matrix, matrix, self.nheads, self.nheads, self.nheads, self.nangles


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    zxBCdt, ngroups = inputs.zxBCdt, options.ngroups
    checks.check_dims(NAME, "zxBCdt", zxBCdt, 2, "(B, 2 H P + 2 R G N + 3 H + S)")
    checks.check_activation_dtype(NAME, "zxBCdt", zxBCdt)
    checks.check_dims(NAME, "ssm_state", inputs.ssm_state, 4, "(B, H, P, N)")
    checks.check_dims(NAME, "angle_state", inputs.angle_state, 3, "(B, H, S)")
    checks.check_dims(NAME, "B_bias", inputs.B_bias, 3, "(H, R, N)")
    batch, (_, nheads, headdim, dstate) = zxBCdt.shape[0], inputs.ssm_state.shape
    rank, nangles = inputs.B_bias.shape[1], inputs.angle_state.shape[2]
    checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    check_head(NAME, headdim, dstate)
    check_rank(NAME, rank)
    check_angles(NAME, nangles, dstate)
    sizes = Sizes(batch, rank, nheads, headdim, ngroups, dstate, nangles)
    if zxBCdt.shape[1] != sum(sizes.columns):
        raise ValueError(
            f"{NAME}: zxBCdt must have 2 H P + 2 R G N + 3 H + S = {sum(sizes.columns)} columns with H = {nheads}, "
            f"P = {headdim}, R = {rank}, G = {ngroups}, N = {dstate}, S = {nangles}, got {zxBCdt.shape[1]}"
        )
    shapes = {
        "ssm_state": ((batch, nheads, headdim, dstate), "(B, H, P, N)"),
        "k_state": ((batch, rank, nheads, dstate), "(B, R, H, N)"),
        "v_state": ((batch, nheads, headdim), "(B, H, P)"),
    }
    states = batch, nheads, nangles
    checks.check_float32(NAME, "angle_state", inputs.angle_state, states, zxBCdt, "zxBCdt", "(B, H, S)")
    for name, (shape, letters) in (shapes | parameter_shapes(sizes)).items():
        tensor = getattr(inputs, name)
        if tensor is not None:
            checks.check_float(NAME, name, tensor, shape, zxBCdt, "zxBCdt", letters)
    for name in STATE_NAMES:
        checks.check_writable(NAME, name, getattr(inputs, name))
    return sizes


def check_rank(op, rank):
    if not 1 <= rank <= abi.MAX_RANK:
        raise ValueError(f"{op}: the rank (R of B_bias) must lie in 1..{abi.MAX_RANK}, got {rank}")


def check_angles(op, nangles, dstate):
    if 2 * nangles > dstate:
        raise ValueError(f"{op}: each angle rotates two of the {dstate} entries of B and C, got {nangles} angles")


def parameter_shapes(sizes):
    """{name: (shape, its letters)} of a layer's parameters."""
    nheads, headdim, rank, dstate = sizes.nheads, sizes.headdim, sizes.rank, sizes.dstate
    return {
        "dt_bias": ((nheads,), "(H,)"),
        "B_weight": ((dstate,), "(N,)"),
        "C_weight": ((dstate,), "(N,)"),
        "B_bias": ((nheads, rank, dstate), "(H, R, N)"),
        "C_bias": ((nheads, rank, dstate), "(H, R, N)"),
        "D": ((nheads,), "(H,)"),
        "mimo_x": ((nheads, rank, headdim), "(H, R, P)"),
        "mimo_z": ((nheads, rank, headdim), "(H, R, P)"),
        "mimo_o": ((nheads, rank, headdim), "(H, R, P)"),
        "norm_weight": ((nheads * headdim,), "(H P,)"),
    }


def kernel_layout(inputs):
    """As the kernels take them: zxBCdt's rows in a piece, all but the norms' weights of one dtype and these of one, and
    contiguous. The states are left out.
    """
    zxBCdt = inputs.zxBCdt if inputs.zxBCdt.stride(1) == 1 else inputs.zxBCdt.contiguous()
    given = inputs._asdict()
    for names in (_PARAMETERS, _WEIGHTS):
        tensors = [given[name] for name in names]
        if len({tensor.dtype for tensor in tensors if tensor is not None}) > 1:
            tensors = map(checks.widen, tensors)
        given.update(zip(names, map(checks.contiguous, tensors), strict=True))
    return Inputs(**(given | dict.fromkeys(STATE_NAMES) | {"zxBCdt": zxBCdt}))


def fill(params, sizes, inputs, options, states, out):
    """Sets all fields but the run's, from kernel_layout's tensors and contiguous states."""
    zxBCdt = inputs.zxBCdt
    params.batch, params.rank, params.nheads, params.headdim, params.ngroups, params.dstate, params.nangles = sizes
    params.seqlen, params.sequences = 1, sizes.batch
    dtype = DTYPE_CODES[zxBCdt.dtype]
    params.dtype = params.adt_dtype = params.dt_dtype = params.trap_dtype = params.angle_dtype = dtype
    params.parameter_dtype = DTYPE_CODES[inputs.dt_bias.dtype]
    params.weight_dtype = DTYPE_CODES[inputs.B_weight.dtype]
    params.pairwise = options.pairwise
    params.A_softplus = options.A_softplus
    params.A_floor = options.A_floor
    params.k_eps, params.q_eps, params.norm_eps = options.B_eps, options.C_eps, options.norm_eps
    element, first, stride = zxBCdt.element_size(), zxBCdt.data_ptr(), zxBCdt.stride(0)
    z, *parts = (first + before * element for before in itertools.accumulate(sizes.columns[:-1], initial=0))
    params.v, params.k, params.q, params.dt, params.adt, params.trap, params.angles = parts
    if options.gate:
        params.z = z
    params.z_head_stride = params.v_head_stride = sizes.headdim
    params.q_group_stride = params.k_group_stride = sizes.dstate
    params.q_rank_stride = params.k_rank_stride = sizes.ngroups * sizes.dstate
    params.dt_head_stride = params.adt_head_stride = params.trap_head_stride = 1
    for name in ("z", "v", "q", "k", "dt", "adt", "trap", "angle"):
        setattr(params, f"{name}_batch_stride", stride)
    params.dt_bias = inputs.dt_bias.data_ptr()
    params.q_weight, params.k_weight = inputs.C_weight.data_ptr(), inputs.B_weight.data_ptr()
    params.q_bias, params.k_bias = inputs.C_bias.data_ptr(), inputs.B_bias.data_ptr()
    params.D = pointer(inputs.D)
    params.mimo_v, params.mimo_z, params.mimo_out = map(pointer, (inputs.mimo_x, inputs.mimo_z, inputs.mimo_o))
    params.norm_weight = pointer(inputs.norm_weight)
    place_states(params, states)
    params.out = out.data_ptr()
    params.out_batch_stride, *rank_stride, params.out_head_stride, _ = out.stride()
    params.out_rank_stride = rank_stride[0] if rank_stride else 0


def out_shape(sizes, inputs):
    heads = sizes.nheads, sizes.headdim
    return (sizes.batch, *(heads if inputs.mimo_o is not None else (sizes.rank, *heads)))
