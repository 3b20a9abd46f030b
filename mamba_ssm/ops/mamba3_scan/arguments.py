"""What Mamba-3's scan takes: its arguments as records, their checks, and where packed sequences lie.

Letters: B batch, L length, R rank, H heads, P headdim, G groups of Q and K, N dstate, S angles, U sequences (B, or
those that cu_seqlens bounds). Q, K and V are what Mamba-2's scan calls C, B and x.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, pointer
from mamba_ssm._torch import make, values_at_hand

NAME = "mamba3_scan"  # what errors call the operators


class States(typing.NamedTuple):
    """What one call passes to the next: all float32, zero before the first step."""

    angle: torch.Tensor  # (U, H, S) the angles of the rotation, in [0, 2 pi)
    ssm: torch.Tensor  # (U, H, P, N)
    k: torch.Tensor  # (U, R, H, N) the last step's K with its bias, rotated
    v: torch.Tensor  # (U, H, P) the last step's V


class Inputs(typing.NamedTuple):
    """The tensors that the scan takes, in their order."""

    Q: torch.Tensor  # (B, L, R, G, N)
    K: torch.Tensor  # (B, L, R, G, N)
    V: torch.Tensor  # (B, L, H, P)
    ADT: torch.Tensor  # (B, L, H)
    DT: torch.Tensor  # (B, L, H)
    Trap: torch.Tensor  # (B, L, H)
    Q_bias: torch.Tensor  # (H, R, N)
    K_bias: torch.Tensor  # (H, R, N)
    Angles: torch.Tensor  # (B, L, S), or (B, L, H, S)
    D: torch.Tensor | None  # (H)
    Z: torch.Tensor | None  # (B, L, H, P)
    MIMO_V: torch.Tensor | None  # (H, R, P)
    MIMO_Z: torch.Tensor | None  # (H, R, P)
    MIMO_Out: torch.Tensor | None  # (H, R, P)
    norm_weight: torch.Tensor | None  # (H, P)
    angle_state: torch.Tensor | None  # the four of States, all or none
    ssm_state: torch.Tensor | None
    k_state: torch.Tensor | None
    v_state: torch.Tensor | None
    seq_idx: torch.Tensor | None  # (B, L)
    cu_seqlens: torch.Tensor | None  # (U + 1)

    @property
    def states(self):
        """The initial states, or None."""
        if self.ssm_state is None:
            return None
        return States(self.angle_state, self.ssm_state, self.k_state, self.v_state)


REQUIRED = Inputs._fields[: Inputs._fields.index("D")]
STATE_NAMES = tuple(f"{name}_state" for name in States._fields)


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


def check(inputs, any_states=False):
    """Raises on any argument that the kernels do not take; returns the sizes. any_states: the states, but for the
    angle, may also be float16 or bfloat16.
    """
    Q, V, Angles = inputs.Q, inputs.V, inputs.Angles
    checks.check_dims(NAME, "V", V, 4, "(B, L, H, P)")
    checks.check_activation_dtype(NAME, "V", V)
    checks.check_dims(NAME, "Q", Q, 5, "(B, L, R, G, N)")
    checks.check_tensor(NAME, "Angles", Angles)
    batch, seqlen, nheads, headdim = V.shape
    rank, ngroups, dstate = Q.shape[2:]
    for name, size, most in (
        ("headdim (P of V)", headdim, abi.MAX_HEADDIM),
        ("dstate (N of Q)", dstate, abi.MAX_DSTATE),
    ):
        if not 1 <= size <= most:
            raise ValueError(f"{NAME}: {name} must lie in 1..{most}, got {size}")
    if not 1 <= rank <= abi.MAX_RANK:
        raise ValueError(f"{NAME}: the rank (R of Q) must lie in 1..{abi.MAX_RANK}, got {rank}")
    checks.check_groups(NAME, "nheads (heads of V)", nheads, ngroups)
    letters = "(B, L, R, G, N)"
    checks.check_same(NAME, "Q", Q, (batch, seqlen, rank, ngroups, dstate), V, "V", letters)
    checks.check_same(NAME, "K", inputs.K, Q.shape, V, "V", letters)
    for name in ("ADT", "DT", "Trap"):
        checks.check_float(NAME, name, getattr(inputs, name), (batch, seqlen, nheads), V, "V", "(B, L, H)")
    if Angles.dim() == 4:
        nangles = Angles.shape[3]
        checks.check_float(NAME, "Angles", Angles, (batch, seqlen, nheads, nangles), V, "V", "(B, L, H, S)")
    else:
        checks.check_dims(NAME, "Angles", Angles, 3, "(B, L, S) or (B, L, H, S)")
        nangles = Angles.shape[2]
        checks.check_float(NAME, "Angles", Angles, (batch, seqlen, nangles), V, "V", "(B, L, S) or (B, L, H, S)")
    if 2 * nangles > dstate:
        raise ValueError(f"{NAME}: each angle rotates two of the {dstate} entries of Q and K, got {nangles} angles")
    if inputs.Z is not None:
        checks.check_same(NAME, "Z", inputs.Z, V.shape, V, "V", "(B, L, H, P)")
    _check_parameters(inputs, nheads, rank, headdim, dstate)
    sequences = check_packing(NAME, V, "V", inputs)
    sizes = make(Sizes, (batch, seqlen, rank, nheads, headdim, ngroups, dstate, nangles, sequences))
    check_states(NAME, V, "V", inputs, sizes, any_states)
    return sizes


def _check_parameters(inputs, nheads, rank, headdim, dstate):
    projection = (nheads, rank, headdim), "(H, R, P)"
    bias = (nheads, rank, dstate), "(H, R, N)"
    shapes = {"Q_bias": bias, "K_bias": bias, "D": ((nheads,), "(H,)"), "norm_weight": ((nheads, headdim), "(H, P)")}
    for name, (shape, letters) in (shapes | dict.fromkeys(("MIMO_V", "MIMO_Z", "MIMO_Out"), projection)).items():
        tensor = getattr(inputs, name)
        if tensor is not None or name.endswith("bias"):
            checks.check_float32(NAME, name, tensor, shape, inputs.V, "V", letters)


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
    """The same tensors in the layout that the kernels take: any strides but along the last dimension of Q, K, V, Angles
    and Z, and parameters and states contiguous.
    """
    if checks.all_contiguous(inputs):
        return inputs
    strided = {name: checks.unit_last_stride(getattr(inputs, name)) for name in ("Q", "K", "V", "Angles", "Z")}
    any_strides = {name: getattr(inputs, name) for name in ("ADT", "DT", "Trap")}
    return Inputs(
        *(
            strided[name] if name in strided else any_strides.get(name, checks.contiguous(tensor))
            for name, tensor in zip(Inputs._fields, inputs, strict=True)
        )
    )


def fill(params, sizes, inputs, options):
    """Sets the fields that forward and backward share, from tensors in kernel layout."""
    Q, K, V, Angles, Z = inputs.Q, inputs.K, inputs.V, inputs.Angles, inputs.Z
    params.batch = sizes.batch
    params.seqlen = sizes.seqlen
    params.rank = sizes.rank
    params.nheads = sizes.nheads
    params.headdim = sizes.headdim
    params.ngroups = sizes.ngroups
    params.dstate = sizes.dstate
    params.nangles = sizes.nangles
    params.sequences = sizes.sequences
    params.dtype = DTYPE_CODES[V.dtype]
    params.adt_dtype = DTYPE_CODES[inputs.ADT.dtype]
    params.dt_dtype = DTYPE_CODES[inputs.DT.dtype]
    params.trap_dtype = DTYPE_CODES[inputs.Trap.dtype]
    params.angle_dtype = DTYPE_CODES[Angles.dtype]
    params.pairwise = options.pairwise
    params.norm_eps = options.norm_eps
    params.q = Q.data_ptr()
    params.q_batch_stride, params.q_len_stride, params.q_rank_stride, params.q_group_stride, _ = Q.stride()
    params.k = K.data_ptr()
    params.k_batch_stride, params.k_len_stride, params.k_rank_stride, params.k_group_stride, _ = K.stride()
    params.v = V.data_ptr()
    params.v_batch_stride, params.v_len_stride, params.v_head_stride, _ = V.stride()
    params.adt = inputs.ADT.data_ptr()
    params.adt_batch_stride, params.adt_len_stride, params.adt_head_stride = inputs.ADT.stride()
    params.dt = inputs.DT.data_ptr()
    params.dt_batch_stride, params.dt_len_stride, params.dt_head_stride = inputs.DT.stride()
    params.trap = inputs.Trap.data_ptr()
    params.trap_batch_stride, params.trap_len_stride, params.trap_head_stride = inputs.Trap.stride()
    params.angles = Angles.data_ptr()
    params.angles_of_heads = Angles.dim() == 4
    if Angles.dim() == 4:
        params.angle_batch_stride, params.angle_len_stride, params.angle_head_stride, _ = Angles.stride()
    else:
        params.angle_batch_stride, params.angle_len_stride, _ = Angles.stride()
    if Z is not None:
        params.z = Z.data_ptr()
        params.z_batch_stride, params.z_len_stride, params.z_head_stride, _ = Z.stride()
    params.q_bias = inputs.Q_bias.data_ptr()
    params.k_bias = inputs.K_bias.data_ptr()
    params.D = pointer(inputs.D)
    params.mimo_v = pointer(inputs.MIMO_V)
    params.mimo_z = pointer(inputs.MIMO_Z)
    params.mimo_out = pointer(inputs.MIMO_Out)
    params.norm_weight = pointer(inputs.norm_weight)
    params.angle_state = pointer(inputs.angle_state)
    params.ssm_state = pointer(inputs.ssm_state)
    params.k_state = pointer(inputs.k_state)
    params.v_state = pointer(inputs.v_state)
    params.seq_idx = pointer(inputs.seq_idx)
    params.cu_seqlens = pointer(inputs.cu_seqlens)


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


def place_out(params, inputs, out):
    """Sets the output's fields."""
    params.out = out.data_ptr()
    if inputs.MIMO_Out is None:
        params.out_batch_stride, params.out_len_stride, params.out_rank_stride, params.out_head_stride, _ = out.stride()
    else:
        params.out_batch_stride, params.out_len_stride, params.out_head_stride, _ = out.stride()


def out_shape(sizes, inputs):
    heads = sizes.nheads, sizes.headdim
    return (*inputs.V.shape[:2], *(heads if inputs.MIMO_Out is not None else (sizes.rank, *heads)))


def new_like(tensor, inputs, shape=None):
    """A new contiguous tensor for results; zero where packed sequences may leave steps out at the end."""
    make_new = tensor.new_empty if inputs.cu_seqlens is None else tensor.new_zeros
    return make_new(tensor.shape if shape is None else shape)
