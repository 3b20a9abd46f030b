"""What Mamba-3's scan takes: its arguments as records, their checks, and where packed sequences lie.

Letters: B batch, L length, R rank, H heads, P headdim, G groups of Q and K, N dstate, S angles, U sequences (B, or
those that cu_seqlens bounds). Q, K and V are what Mamba-2's scan calls C, B and x.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES
from mamba_ssm._torch import make, values_at_hand
from mamba_ssm.ops._shared.spec import Arg, Spec
from mamba_ssm.ops._shared.spec import fill as fill_fields

NAME = "mamba3_scan"  # what errors call the operators


class States(typing.NamedTuple):
    """What one call passes to the next: all float32, zero before the first step."""

    angle: torch.Tensor  # (U, H, S) the angles of the rotation, in [0, 2 pi)
    ssm: torch.Tensor  # (U, H, P, N)
    k: torch.Tensor  # (U, R, H, N) the last step's K with its bias, rotated
    v: torch.Tensor  # (U, H, P) the last step's V


_QK = Arg("same", "B, L, R, G, N", "batch len rank group -")
_HEADS = Arg("same", "B, L, H, P", "batch len head -")
_STEPS = Arg("float", "B, L, H", "batch len head")
_ANGLES = Arg("float", "B, L, S | B, L, H, S", "batch len - | batch len head -", field="angles", stem="angle")
_BIAS, _PROJECTION = Arg("float32", "H, R, N"), Arg("float32", "H, R, P")


class Inputs(typing.NamedTuple):
    """The tensors that the scan takes, in their order."""

    Q: Annotated[torch.Tensor, _QK._replace(field="q")]
    K: Annotated[torch.Tensor, _QK._replace(field="k")]
    V: Annotated[torch.Tensor, _HEADS._replace(field="v", code="dtype")]
    ADT: Annotated[torch.Tensor, _STEPS._replace(field="adt", code="adt_dtype")]
    DT: Annotated[torch.Tensor, _STEPS._replace(field="dt", code="dt_dtype")]
    Trap: Annotated[torch.Tensor, _STEPS._replace(field="trap", code="trap_dtype")]
    Q_bias: Annotated[torch.Tensor, _BIAS._replace(field="q_bias")]
    K_bias: Annotated[torch.Tensor, _BIAS._replace(field="k_bias")]
    Angles: Annotated[torch.Tensor, _ANGLES._replace(code="angle_dtype")]
    D: Annotated[torch.Tensor | None, Arg("float32", "H")]
    Z: Annotated[torch.Tensor | None, _HEADS._replace(field="z")]
    MIMO_V: Annotated[torch.Tensor | None, _PROJECTION._replace(field="mimo_v")]
    MIMO_Z: Annotated[torch.Tensor | None, _PROJECTION._replace(field="mimo_z")]
    MIMO_Out: Annotated[torch.Tensor | None, _PROJECTION._replace(field="mimo_out")]
    norm_weight: Annotated[torch.Tensor | None, Arg("float32", "H, P")]
    angle_state: Annotated[torch.Tensor | None, Arg("float32", "U, H, S")]  # the four of States, all or none
    ssm_state: Annotated[torch.Tensor | None, Arg("float32", "U, H, P, N")]
    k_state: Annotated[torch.Tensor | None, Arg("float32", "U, R, H, N")]
    v_state: Annotated[torch.Tensor | None, Arg("float32", "U, H, P")]
    seq_idx: Annotated[torch.Tensor | None, Arg("int32", "B, L")]
    cu_seqlens: Annotated[torch.Tensor | None, Arg("", "U + 1")]

    @property
    def states(self):
        """The initial states, or None."""
        if self.ssm_state is None:
            return None
        return States(self.angle_state, self.ssm_state, self.k_state, self.v_state)


REQUIRED = Inputs._fields[: Inputs._fields.index("D")]
STATE_NAMES = tuple(f"{name}_state" for name in States._fields)


class FinalStates(typing.NamedTuple):
    """Those after the last step, and then their gradients, as the kernels' parameters have them."""

    final_angle: Annotated[torch.Tensor | None, Arg("", "U, H, S")]
    final_ssm: Annotated[torch.Tensor | None, Arg("", "U, H, P, N")]
    final_k: Annotated[torch.Tensor | None, Arg("", "U, R, H, N")]
    final_v: Annotated[torch.Tensor | None, Arg("", "U, H, P")]


class Out(typing.NamedTuple):
    """The output, of the heads or of each of their rows."""

    out: Annotated[torch.Tensor, Arg("", "B, L, H, P | B, L, R, H, P", "batch len head - | batch len rank head -")]


class Options(typing.NamedTuple):
    """What else the scan takes, in their order."""

    pairwise: bool  # which entries of Q and K an angle turns: neighbours, or those half of N apart
    norm_eps: float


class Sizes(typing.NamedTuple):
    batch: int
    seqlen: int
    rank: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    nangles: int
    sequences: int

    @property
    def states(self):
        """Shapes of the states before or after a step."""
        rows, heads = self.sequences, self.nheads
        return States(
            (rows, heads, self.nangles),
            (rows, heads, self.headdim, self.dstate),
            (rows, self.rank, heads, self.dstate),
            (rows, heads, self.headdim),
        )


_SPEC = Spec(NAME, Inputs)
_NOT_STATES = tuple(name for name in Inputs._fields if name not in STATE_NAMES and name != "seq_idx")


def check(inputs, any_states=False):
    """Raises on any argument that the kernels do not take; returns the sizes. any_states: the states, but for the
    angle, may also be float16 or bfloat16.
    """
    Q, V, Angles = inputs.Q, inputs.V, inputs.Angles
    checks.check_dims(NAME, "V", V, 4, "(B, L, H, P)")
    checks.check_activation_dtype(NAME, "V", V)
    checks.check_dims(NAME, "Q", Q, 5, "(B, L, R, G, N)")
    checks.check_tensor(NAME, "Angles", Angles)
    if Angles.dim() != 4:
        checks.check_dims(NAME, "Angles", Angles, 3, "(B, L, S) or (B, L, H, S)")
    (batch, seqlen, nheads, headdim), (rank, ngroups, dstate), nangles = V.shape, Q.shape[2:], Angles.shape[-1]
    for name, size, most in (
        ("headdim (P of V)", headdim, abi.MAX_HEADDIM),
        ("dstate (N of Q)", dstate, abi.MAX_DSTATE),
        ("the rank (R of Q)", rank, abi.MAX_RANK),
    ):
        if not 1 <= size <= most:
            raise ValueError(f"{NAME}: {name} must lie in 1..{most}, got {size}")
    checks.check_groups(NAME, "nheads (heads of V)", nheads, ngroups)
    sizes = make(Sizes, (batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles, batch))
    _SPEC.check(inputs, dict(zip("BLRHPGNSU", sizes, strict=True)), _NOT_STATES, like=V, like_name="V")
    if 2 * nangles > dstate:
        raise ValueError(f"{NAME}: each angle rotates two of the {dstate} entries of Q and K, got {nangles} angles")
    sizes = sizes._replace(sequences=check_packing(NAME, V, "V", inputs))
    check_states(NAME, V, "V", inputs, sizes, any_states)
    return sizes


def check_packing(op, x, x_name, inputs):
    """Returns the number of sequences in x (B, L, ...) that have states. Values are looked at by those who can."""
    seq_idx, cu_seqlens = inputs.seq_idx, inputs.cu_seqlens
    if seq_idx is not None:
        if cu_seqlens is not None:
            raise ValueError(f"{op}: packed sequences are given by seq_idx or by cu_seqlens, got both")
        checks.check_int32(op, "seq_idx", seq_idx, x.shape[:2], x, x_name, "(B, L)")
    if cu_seqlens is None:
        return x.shape[0]
    checks.check_dims(op, "cu_seqlens", cu_seqlens, 1, "(sequences + 1,)")
    if x.shape[0] != 1:
        raise ValueError(
            f"{op}: cu_seqlens is for sequences packed in one row: {x_name} must have batch 1, got {x.shape[0]}"
        )
    sequences = max(cu_seqlens.shape[0] - 1, 0)
    checks.check_int32(op, "cu_seqlens", cu_seqlens, (sequences + 1,), x, x_name, "(sequences + 1,)")
    return sequences


def check_bounds_at_hand(op, x, cu_seqlens):
    """The values of cu_seqlens, of x (B, L, ...), where looking at them is no synchronisation."""
    checks.check_tensor(op, "cu_seqlens", cu_seqlens)
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)  # others are refused where they are read
    if integers and values_at_hand(cu_seqlens) and cu_seqlens.dim() == 1 and len(cu_seqlens):
        checks.check_bounds(op, cu_seqlens.tolist(), x.shape[1])


def check_states(op, x, x_name, inputs, sizes, any_states=False):
    """Raises unless the four states are all absent or all right; any_states as in check."""
    given = [name for name in STATE_NAMES if getattr(inputs, name) is not None]
    if not given:
        return
    if len(given) < len(STATE_NAMES):
        raise ValueError(f"{op}: initial_states are four tensors or None, got only {', '.join(given)}")
    letters = "(U, H, S)", "(U, H, P, N)", "(U, R, H, N)", "(U, H, P)"
    for name, shape, text in zip(STATE_NAMES, sizes.states, letters, strict=True):
        narrow = any_states and name != "angle_state"
        check_state = checks.check_float if narrow else checks.check_float32
        check_state(op, name, getattr(inputs, name), shape, x, x_name, text)


def kernel_layout(inputs):
    """The same tensors in the layout that the kernels take."""
    return _SPEC.layout(inputs)


def fill(params, sizes, inputs, options, *records):
    """Sets the fields of the inputs and other records, of tensors (or Views) in kernel layout."""
    fill_fields(params, sizes, options, inputs, *records)
    params.angles_of_heads = inputs.Angles.dim() == 4


def place_states(params, states):
    """Sets the states' fields of a step: contiguous, of any dtype but the angle."""
    angle, ssm, k, v = states
    params.ssm_dtype = DTYPE_CODES[ssm.dtype]
    params.k_dtype = DTYPE_CODES[k.dtype]
    params.v_dtype = DTYPE_CODES[v.dtype]
    params.state_angle = angle.data_ptr()
    params.state_ssm = ssm.data_ptr()
    params.state_k = k.data_ptr()
    params.state_v = v.data_ptr()


def out_shape(sizes, inputs):
    heads = sizes.nheads, sizes.headdim
    return (*inputs.V.shape[:2], *(heads if inputs.MIMO_Out is not None else (sizes.rank, *heads)))


def new_like(tensor, inputs, shape=None):
    """A new contiguous tensor for results; zero where packed sequences may leave steps out at the end."""
    make_new = tensor.new_empty if inputs.cu_seqlens is None else tensor.new_zeros
    return make_new(tensor.shape if shape is None else shape)
