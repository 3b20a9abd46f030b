"""A Mamba-3 layer's decoding step: its arguments as records, their checks, and the kernels' parameters.

Letters: B batch, R rank, H heads, P headdim, G groups of B and C, N dstate, S angles.
"""

import itertools
import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec
from mamba_ssm.ops._shared.spec import fill as fill_fields
from mamba_ssm.ops.ssd.arguments import check_head

NAME = "mamba3_block_step"


_BIAS, _PROJECTION = Arg("float", "H, R, N"), Arg("float", "H, R, P")


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; the states are written in place."""

    zxBCdt: Annotated[torch.Tensor, Arg("", "B, C")]
    angle_state: Annotated[torch.Tensor, Arg("float32", "B, H, S", field="state_angle")]
    ssm_state: Annotated[torch.Tensor, Arg("float", "B, H, P, N", field="state_ssm", code="ssm_dtype")]
    k_state: Annotated[torch.Tensor, Arg("float", "B, R, H, N", field="state_k", code="k_dtype")]
    v_state: Annotated[torch.Tensor, Arg("float", "B, H, P", field="state_v", code="v_dtype")]
    dt_bias: Annotated[torch.Tensor, Arg("float", "H", code="parameter_dtype")]
    B_weight: Annotated[torch.Tensor, Arg("float", "N", field="k_weight", code="weight_dtype")]
    C_weight: Annotated[torch.Tensor, Arg("float", "N", field="q_weight")]
    B_bias: Annotated[torch.Tensor, _BIAS._replace(field="k_bias")]
    C_bias: Annotated[torch.Tensor, _BIAS._replace(field="q_bias")]
    D: Annotated[torch.Tensor | None, Arg("float", "H")]
    mimo_x: Annotated[torch.Tensor | None, _PROJECTION._replace(field="mimo_v")]
    mimo_z: Annotated[torch.Tensor | None, _PROJECTION]
    mimo_o: Annotated[torch.Tensor | None, _PROJECTION._replace(field="mimo_out")]
    norm_weight: Annotated[torch.Tensor | None, Arg("float", "H P")]


# As the kernels take them; zxBCdt goes in parts.
_Parameters = typing.NamedTuple(  # type: ignore[misc]
    "_Parameters", [(name, kind) for name, kind in Inputs.__annotations__.items() if name != "zxBCdt"]
)


class Out(typing.NamedTuple):
    out: Annotated[torch.Tensor, Arg("", "B, H, P | B, R, H, P", "batch head - | batch rank head -")]


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


_SPEC = Spec(NAME, Inputs)


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
    _SPEC.check(inputs, dict(zip("BRHPGNS", sizes, strict=True)), like_name="zxBCdt", like=zxBCdt)
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
    fill_fields(params, sizes, options, make(_Parameters, (*states, *inputs[5:])), Out(out))
    params.seqlen, params.sequences = 1, sizes.batch
    dtype = DTYPE_CODES[zxBCdt.dtype]
    params.dtype = params.adt_dtype = params.dt_dtype = params.trap_dtype = params.angle_dtype = dtype
    params.k_eps, params.q_eps = options.B_eps, options.C_eps
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


def out_shape(sizes, inputs):
    heads = sizes.nheads, sizes.headdim
    return (sizes.batch, *(heads if inputs.mimo_o is not None else (sizes.rank, *heads)))
