"""What the operators of the selective scan share: their arguments as records, checks, memory layout and parameters.

Letters: B batch, D channels, L length, N dstate, G groups of B and C.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, ask
from mamba_ssm._torch import make

NAME = "selective_scan"  # what errors call the operators


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    delta_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    seq_idx: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else all of the operators take."""

    delta_softplus: bool
    reverse: bool = False  # the scan goes from the last step to the first


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    dstate: int
    ngroups: int

    @property
    def state(self):
        """Shape of the states before or after a step."""
        return self.batch, self.dim, self.dstate

    @property
    def checkpoints(self):
        """Floats to allocate for the states that the forward scan stores for the backward scan: (B, (L-1)//64, D, N),
        flat. Two more than that, of no value, since compilers specialise graphs on sizes of 0 and 1, that is on short
        sequences.
        """
        count = (self.seqlen - 1) // abi.SCAN_CHECKPOINT if self.seqlen > 0 else 0
        return self.batch * count * self.dim * self.dstate + 2


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes.

    This runs at every call, so the comparisons stand here and only a failure goes to the functions that explain it.
    """
    u, delta, A, B, C, z = inputs.u, inputs.delta, inputs.A, inputs.B, inputs.C, inputs.z
    shape, dtype, device = u.shape, u.dtype, u.get_device()
    if len(shape) != 3 or dtype not in checks.FLOAT_DTYPES:
        checks.check_dims(NAME, "u", u, 3, "(B, D, L)")
        checks.check_activation_dtype(NAME, "u", u)
    batch, dim, seqlen = shape
    if delta.shape != shape or delta.dtype != dtype or delta.get_device() != device:
        checks.check_same(NAME, "delta", delta, shape, u, "u", "(B, D, L)")
    dstate = A.shape[-1] if A.dim() == 2 else -1
    check_parameters(NAME, (dim, dstate), u, "u", inputs)
    ngroups = 1
    if B.dim() == 4:
        ngroups = B.shape[1]
    elif C.dim() == 4:
        ngroups = C.shape[1]
    if ngroups != 1:
        checks.check_groups(NAME, "dim (channels of u)", dim, ngroups)
    check_matrix(NAME, "B", B, (batch, ngroups, dstate, seqlen), u, "u", dim)
    if C.shape != B.shape or C.dtype != B.dtype or C.get_device() != B.get_device():
        check_matrix(NAME, "C", C, (batch, ngroups, dstate, seqlen), u, "u", dim)
    if z is not None and (z.shape != shape or z.dtype != dtype or z.get_device() != device):
        checks.check_same(NAME, "z", z, shape, u, "u", "(B, D, L)")
    sizes = make(Sizes, (batch, dim, seqlen, dstate, ngroups))
    if inputs.initial_state is not None:
        checks.check_float32(NAME, "initial_state", inputs.initial_state, sizes.state, u, "u", "(B, D, N)")
    if inputs.seq_idx is not None:
        checks.check_int32(NAME, "seq_idx", inputs.seq_idx, (batch, seqlen), u, "u", "(B, L)")
    return sizes


def check_parameters(op, shape_of_A, like, like_name, inputs):
    """A (D, N), D and delta_bias (D), also of operators whose other inputs are others; like: an activation."""
    A, D, delta_bias = inputs.A, inputs.D, inputs.delta_bias
    dim, dstate = shape_of_A
    device = like.get_device()
    fits = A.shape == shape_of_A and A.dtype == torch.float32 and A.get_device() == device
    if not fits or not 1 <= dstate <= abi.MAX_DSTATE:
        checks.no_complex(op, "A", A)
        checks.check_dims(op, "A", A, 2, "(D, N)")
        checks.check_float32(op, "A", A, shape_of_A, like, like_name, "(D, N)")
        checks.check_dstate(op, dstate, abi.MAX_DSTATE)
    shape = (dim,)
    if D is not None and (D.shape != shape or D.dtype != torch.float32 or D.get_device() != device):
        checks.check_float32(op, "D", D, shape, like, like_name, "(D,)")
    if delta_bias is not None and (
        delta_bias.shape != shape or delta_bias.dtype != torch.float32 or delta_bias.get_device() != device
    ):
        checks.check_float32(op, "delta_bias", delta_bias, shape, like, like_name, "(D,)")


def check_fake(op, *records):
    """For fakes, beside check: a meta tensor has the device number of a CPU tensor, and never reaches a kernel."""
    first, like = records[0]._fields[0], records[0][0]
    for record in records:
        for name, tensor in record._asdict().items():
            if tensor is not None and tensor.device != like.device:
                raise ValueError(f"{op}: {name} must be on {like.device} like {first}, got {tensor.device}")


def check_matrix(op, name, matrix, shape, like, like_name, dim):
    """B or C: (B, G, N, L), or without G where there is one group, or constant (D, N)."""
    dims = matrix.dim()
    letters = "(B, G, N, L)"
    if dims == 3 and shape[1] == 1:
        shape, letters = (shape[0], *shape[2:]), "(B, N, L)"
    elif dims == 2:
        checks.check_float32(op, name, matrix, (dim, shape[2]), like, like_name, "(D, N) as a constant")
        return
    elif dims not in (3, 4):
        raise ValueError(
            f"{op}: {name} must be (B, G, N, L), (B, N, L), or constant (D, N), got shape {tuple(matrix.shape)}"
        )
    if matrix.shape != shape or matrix.dtype != like.dtype or matrix.get_device() != like.get_device():
        checks.check_same(op, name, matrix, shape, like, like_name, letters)


def kernel_layout(inputs):
    """The same tensors in the layout that the kernels take: stride 1 along the length, parameters contiguous."""
    if checks.all_contiguous(inputs):
        return inputs
    B, C = inputs.B, inputs.C
    layout = (
        checks.unit_last_stride(inputs.u),
        checks.unit_last_stride(inputs.delta),
        inputs.A.contiguous(),
        checks.unit_last_stride(B) if B.dim() > 2 else B.contiguous(),
        checks.unit_last_stride(C) if C.dim() > 2 else C.contiguous(),
        checks.contiguous(inputs.D),
        checks.unit_last_stride(inputs.z),
        checks.contiguous(inputs.delta_bias),
        checks.contiguous(inputs.initial_state),
        checks.contiguous(inputs.seq_idx),
    )
    return make(Inputs, layout)


def fill(params, sizes, inputs, options, out, checkpoints):
    """Sets the fields that forward and backward share, from tensors (or Views) in kernel layout."""
    u, delta, B, C, z = inputs.u, inputs.delta, inputs.B, inputs.C, inputs.z
    params.batch, params.dim, params.seqlen, params.dstate, params.ngroups = sizes
    params.dtype = DTYPE_CODES[u.dtype]
    params.delta_softplus = options.delta_softplus
    params.reverse = options.reverse
    set_inputs(params, [None if tensor is None else tensor.data_ptr() for tensor in inputs])
    params.u_batch_stride, params.u_dim_stride, _ = u.stride()
    params.delta_batch_stride, params.delta_dim_stride, _ = delta.stride()
    params.variable_B = B.dim() > 2
    params.B_batch_stride, params.B_group_stride, params.B_dstate_stride = matrix_strides(B)
    params.variable_C = C.dim() > 2
    params.C_batch_stride, params.C_group_stride, params.C_dstate_stride = matrix_strides(C)
    if z is not None:
        params.z_batch_stride, params.z_dim_stride, _ = z.stride()
    if out is not None:
        params.out = out.data_ptr()
        params.out_batch_stride, params.out_dim_stride, _ = out.stride()
    if checkpoints is not None:
        params.checkpoints = checkpoints.data_ptr()


def set_inputs(params, addresses):
    """Sets the fields of the inputs' addresses; addresses: in the order of Inputs."""
    params.u, params.delta, params.A, params.B, params.C, params.D, params.z, *rest = addresses
    params.delta_bias, params.initial_state, params.seq_idx = rest


def matrix_strides(matrix):
    """Of batch, group and state in B, C or a gradient of one."""
    strides = matrix.stride()
    if len(strides) == 4:
        return strides[:3]
    return (strides[0], 0, strides[1]) if len(strides) == 3 else (0, 0, 0)


def plan_of(functions, params, deterministic):
    """How the library wants to run this problem."""
    plan = abi.MambaSelectiveScanPlan()
    ask(functions, "selective_scan_plan", params, deterministic, plan)
    return plan


def segments_of(functions, params):
    """How many parts forward should split the length into."""
    short = params.seqlen <= abi.SCAN_CHECKPOINT  # never worth it
    return 1 if short else plan_of(functions, params, False).forward_segments


def split_length(params, segments, A, carry=None):
    """Sets how many parts forward splits the length into; returns the memory in which these pass on their states.
    carry: what they have passed on already (see carry.py), which says itself how many.
    """
    if carry is not None:
        params.segments, params.carried, params.workspace = carry.segments, True, carry.workspace.data_ptr()
        return carry.workspace
    params.segments = segments
    if segments == 1:
        return None
    workspace = A.new_empty((segments, 2, params.batch, params.dim, params.dstate))
    params.workspace = workspace.data_ptr()
    return workspace


def allocate_out(u):
    """Memory for the scan's output, in u's layout if that is dense."""
    out = torch.empty_like(u)
    if out.stride(-1) != 1 and u.shape[-1] > 1:  # u was neither dense nor contiguous
        out = u.new_empty(u.shape)
    return out
