"""What the operators of Mamba-2's scan share: their arguments as records, checks, memory layout and parameters.

Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_range
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, backwards
from mamba_ssm._torch import make

NAME = "mamba_chunk_scan_combined"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None
    seq_idx: torch.Tensor | None


class Ungated(typing.NamedTuple):
    """Inputs without z, as backward takes them: the gate's gradient is taken before."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None
    seq_idx: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else all of the operators take, in their order."""

    dt_softplus: bool
    dt_min: float
    dt_max: float
    reverse: bool = False  # the scan goes from the last step to the first

    @property
    def A_is_log(self) -> bool:
        """No argument of these operators, but of the block's; see its Options."""
        return False


class Sizes(typing.NamedTuple):
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int

    @property
    def states(self):
        """Shape of the states before or after a step."""
        return self.batch, self.nheads, self.headdim, self.dstate


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    x, B, C = inputs.x, inputs.B, inputs.C
    if x.dim() != 4 or x.dtype not in checks.FLOAT_DTYPES:
        checks.check_dims(NAME, "x", x, 4, "(B, L, H, P)")
        checks.check_activation_dtype(NAME, "x", x)
    shape, dtype, device = x.shape, x.dtype, x.device
    batch, seqlen, nheads, headdim = shape
    if B.dim() != 4:
        checks.check_dims(NAME, "B", B, 4, "(B, L, G, N)")
    ngroups, dstate = B.shape[2:]
    check_head(NAME, headdim, dstate)
    checks.check_float(NAME, "dt", inputs.dt, (batch, seqlen, nheads), x, "x", "(B, L, H)")
    if B.shape[:2] != shape[:2] or B.dtype != dtype or B.device != device:
        checks.check_same(NAME, "B", B, (batch, seqlen, ngroups, dstate), x, "x", "(B, L, G, N)")
    if ngroups != 1:
        checks.check_groups(NAME, "nheads (heads of x)", nheads, ngroups)
    if C.shape != B.shape or C.dtype != dtype or C.device != device:
        checks.check_same(NAME, "C", C, B.shape, x, "x", "(B, L, G, N)")
    if inputs.z is not None:
        checks.check_same(NAME, "z", inputs.z, shape, x, "x", "(B, L, H, P)")
    sizes = make(Sizes, (batch, seqlen, nheads, headdim, ngroups, dstate))
    check_parameters(NAME, sizes, x, "x", inputs, options)
    return sizes


def check_options(name, chunk_size, dt_limit, state_dtype):
    """Raises on values of these arguments of public functions that mean nothing; returns dt_limit as floats."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"{name}: chunk_size must be a positive integer, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be a positive integer, got {chunk_size}")
    if state_dtype is not None and not (isinstance(state_dtype, torch.dtype) and state_dtype.is_floating_point):
        raise TypeError(f"{name}: state_dtype must be a floating-point torch.dtype or None, got {state_dtype}")
    return check_range(name, "dt_limit", dt_limit)


def check_head(op, headdim, dstate):
    """The kernels hold at most so much of a head."""
    if not 1 <= headdim <= abi.MAX_HEADDIM:
        raise ValueError(
            f"{op}: headdim must lie in 1..{abi.MAX_HEADDIM}, got {headdim}: "
            "split larger heads into several with the same A, dt, B and C"
        )
    if not 1 <= dstate <= abi.MAX_DSTATE:
        raise ValueError(f"{op}: dstate must lie in 1..{abi.MAX_DSTATE}, got {dstate}")


def check_parameters(op, sizes, like, like_name, inputs, options):
    """The part of check that is not about activations, also for a block's operators, which cut these out of one tensor:
    their records have other fields too, but the same names for what is read here.
    """
    A, D, dt_bias, A_is_log = inputs.A, inputs.D, inputs.dt_bias, options.A_is_log
    heads, device, float32 = (sizes.nheads,), like.device, torch.float32
    if A_is_log:
        checks.check_float(op, "A_log", A, heads, like, like_name, "(H,)")
        if dt_bias is not None:
            checks.check_float(op, "dt_bias", dt_bias, heads, like, like_name, "(H,)")
    elif A.dtype != float32 or A.shape != heads or A.device != device:
        checks.no_complex(op, "A", A)
        checks.check_float32(op, "A", A, heads, like, like_name, "(H,)")
    if D is not None and (D.dtype != float32 or D.shape != heads or D.device != device):
        shape, letters = ((sizes.nheads, sizes.headdim), "(H, P)") if D.dim() == 2 else (heads, "(H,)")
        checks.check_float32(op, "D", D, shape, like, like_name, letters)
    if (
        dt_bias is not None
        and not A_is_log
        and (dt_bias.dtype != float32 or dt_bias.shape != heads or dt_bias.device != device)
    ):
        checks.check_float32(op, "dt_bias", dt_bias, heads, like, like_name, "(H,)")
    if inputs.initial_states is not None:
        letters = "(B, H, P, N)"
        checks.check_float32(op, "initial_states", inputs.initial_states, sizes.states, like, like_name, letters)
    if inputs.seq_idx is not None:
        shape = sizes.batch, sizes.seqlen
        checks.check_int32(op, "seq_idx", inputs.seq_idx, shape, like, like_name, "(B, L)")
    if not options.dt_min <= options.dt_max:
        raise ValueError(f"{op}: dt_limit must be (smallest, largest), got ({options.dt_min}, {options.dt_max})")


def with_gate(ungated, z):
    """Inputs of a record without z."""
    x, dt, A, B, C, D, *others = ungated
    return make(Inputs, (x, dt, A, B, C, D, z, *others))


def kernel_layout(inputs, reverse=False):
    """The same tensors in the layout that the kernels take: any strides but along the last dimension of x, z, B and C,
    and parameters and states contiguous. seq_idx, 4 bytes a step, is the one tensor that goes to them in the order in
    which they take the steps.
    """
    if checks.all_contiguous(inputs) and not reverse:
        return inputs
    return Inputs(
        checks.unit_last_stride(inputs.x),
        inputs.dt,
        checks.contiguous(inputs.A),
        checks.unit_last_stride(inputs.B),
        checks.unit_last_stride(inputs.C),
        checks.contiguous(inputs.D),
        checks.unit_last_stride(inputs.z),
        checks.contiguous(inputs.dt_bias),
        checks.contiguous(inputs.initial_states),
        in_order(inputs.seq_idx, reverse),
    )


def in_order(seq_idx, reverse):
    """seq_idx (B, L) as kernels take it, which with reverse take the last step first."""
    return seq_idx.flip(1) if reverse and seq_idx is not None else checks.contiguous(seq_idx)


def of_steps(tensor, sizes, options):
    """A tensor (B, L, ...), or a View of one, with the steps in the order in which the kernels take them."""
    return backwards(tensor, 1, sizes.seqlen) if options.reverse and tensor is not None else tensor


def fill(params, sizes, inputs, options):
    """Sets the fields that forward and backward share, from tensors (or Views) in kernel layout. sizes and options: as
    for check_parameters.
    """
    A, D = inputs.A, inputs.D
    x, dt, B, C, z = (
        of_steps(tensor, sizes, options) for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z)
    )
    params.batch = sizes.batch
    params.seqlen = sizes.seqlen
    params.nheads = sizes.nheads
    params.headdim = sizes.headdim
    params.ngroups = sizes.ngroups
    params.dstate = sizes.dstate
    params.dtype = DTYPE_CODES[x.dtype]
    params.dt_dtype = DTYPE_CODES[dt.dtype]
    params.dt_softplus = options.dt_softplus
    params.dt_min = options.dt_min
    params.dt_max = options.dt_max
    params.x = x.data_ptr()
    params.x_batch_stride, params.x_len_stride, params.x_head_stride, _ = x.stride()
    params.dt = dt.data_ptr()
    params.dt_batch_stride, params.dt_len_stride, params.dt_head_stride = dt.stride()
    params.A = A.data_ptr()
    params.A_dtype = DTYPE_CODES[A.dtype]
    params.A_is_log = options.A_is_log
    params.B = B.data_ptr()
    params.B_batch_stride, params.B_len_stride, params.B_group_stride, _ = B.stride()
    params.C = C.data_ptr()
    params.C_batch_stride, params.C_len_stride, params.C_group_stride, _ = C.stride()
    if D is not None:
        params.D = D.data_ptr()
        # Not D.stride(): a dimension of size 1 may have any.
        params.D_head_stride, params.D_dim_stride = (1, 0) if D.dim() == 1 else (D.shape[1], 1)
    if z is not None:
        params.z = z.data_ptr()
        params.z_batch_stride, params.z_len_stride, params.z_head_stride, _ = z.stride()
    if inputs.dt_bias is not None:
        params.dt_bias = inputs.dt_bias.data_ptr()
        params.dt_bias_dtype = DTYPE_CODES[inputs.dt_bias.dtype]
    if inputs.initial_states is not None:
        params.initial_state = inputs.initial_states.data_ptr()
    if inputs.seq_idx is not None:
        params.seq_idx = inputs.seq_idx.data_ptr()


def allocate_workspace(size_of, params, like):
    """Memory of as many bytes as the library asks for; returns the tensor, to be kept until the call."""
    size = size_of(params)
    if size == 0:
        return None
    workspace = like.new_empty((size,), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    return workspace
