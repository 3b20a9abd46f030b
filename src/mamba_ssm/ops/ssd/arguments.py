"""What the forward and backward operators of Mamba-2's scan share: checks, memory layout and parameters.

Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES
from mamba_ssm.ops._shared import checks

_NAME = "ssd"


def check(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_min, dt_max):
    """Raises on any argument that the kernels do not take; returns batch, seqlen, nheads, headdim, ngroups, dstate."""
    if x.dim() != 4 or x.dtype not in checks.FLOAT_DTYPES:
        checks.check_dims(_NAME, "x", x, 4, "(B, L, H, P)")
        checks.check_activation_dtype(_NAME, "x", x)
    shape, dtype, device = x.shape, x.dtype, x.device
    batch, seqlen, nheads, headdim = shape
    if B.dim() != 4:
        checks.check_dims(_NAME, "B", B, 4, "(B, L, G, N)")
    ngroups, dstate = B.shape[2:]
    check_head(_NAME, headdim, dstate)
    checks.check_float(_NAME, "dt", dt, (batch, seqlen, nheads), x, "x", "(B, L, H)")
    if B.shape[:2] != shape[:2] or B.dtype != dtype or B.device != device:
        checks.check_same(_NAME, "B", B, (batch, seqlen, ngroups, dstate), x, "x", "(B, L, G, N)")
    if ngroups != 1:
        checks.check_groups(_NAME, "nheads (heads of x)", nheads, ngroups)
    if C.shape != B.shape or C.dtype != dtype or C.device != device:
        checks.check_same(_NAME, "C", C, B.shape, x, "x", "(B, L, G, N)")
    if z is not None:
        checks.check_same(_NAME, "z", z, shape, x, "x", "(B, L, H, P)")
    sizes = batch, seqlen, nheads, headdim, ngroups, dstate
    check_parameters(_NAME, sizes, x, "x", A, D, dt_bias, initial_states, seq_idx, dt_min, dt_max)
    return sizes


def check_head(op, headdim, dstate):
    """The kernels hold at most so much of a head."""
    if not 1 <= headdim <= abi.MAX_HEADDIM:
        raise ValueError(
            f"{op}: headdim must lie in 1..{abi.MAX_HEADDIM}, got {headdim}: "
            "split larger heads into several with the same A, dt, B and C"
        )
    if not 1 <= dstate <= abi.MAX_DSTATE:
        raise ValueError(f"{op}: dstate must lie in 1..{abi.MAX_DSTATE}, got {dstate}")


def check_parameters(
    op, sizes, like, like_name, A, D, dt_bias, initial_states, seq_idx, dt_min, dt_max, A_is_log=False
):
    """The part of check that is not about activations, for operators that cut these out of one tensor. A_is_log: A and
    dt_bias are a layer's, float32, float16 or bfloat16.
    """
    batch, seqlen, nheads, headdim, _, dstate = sizes
    heads, device, float32 = (nheads,), like.device, torch.float32
    if A_is_log:
        checks.check_float(op, "A_log", A, heads, like, like_name, "(H,)")
        if dt_bias is not None:
            checks.check_float(op, "dt_bias", dt_bias, heads, like, like_name, "(H,)")
    elif A.dtype != float32 or A.shape != heads or A.device != device:
        checks.no_complex(op, "A", A)
        checks.check_float32(op, "A", A, heads, like, like_name, "(H,)")
    if D is not None and (D.dtype != float32 or D.shape != heads or D.device != device):
        shape, letters = ((nheads, headdim), "(H, P)") if D.dim() == 2 else (heads, "(H,)")
        checks.check_float32(op, "D", D, shape, like, like_name, letters)
    if (
        dt_bias is not None
        and not A_is_log
        and (dt_bias.dtype != float32 or dt_bias.shape != heads or dt_bias.device != device)
    ):
        checks.check_float32(op, "dt_bias", dt_bias, heads, like, like_name, "(H,)")
    if initial_states is not None:
        states = (batch, nheads, headdim, dstate)
        checks.check_float32(op, "initial_states", initial_states, states, like, like_name, "(B, H, P, N)")
    if seq_idx is not None:
        checks.check_int32(op, "seq_idx", seq_idx, (batch, seqlen), like, like_name, "(B, L)")
    if not dt_min <= dt_max:
        raise ValueError(f"{op}: dt_limit must be (smallest, largest), got ({dt_min}, {dt_max})")


def kernel_layout(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx):
    """The same tensors in the layout that the kernels take: any strides but along the last dimension of x, z, B and C,
    and parameters and states contiguous.
    """
    x, B, C, z = (checks.unit_last_stride(tensor) for tensor in (x, B, C, z))
    others = A, D, dt_bias, initial_states, seq_idx
    A, D, dt_bias, initial_states, seq_idx = (checks.contiguous(tensor) for tensor in others)
    return x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx


def fill(params, sizes, tensors, dt_softplus, dt_min, dt_max, A_is_log=False):
    """Sets the fields that forward and backward share, from tensors (or Views) in kernel layout."""
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx = tensors
    params.batch, params.seqlen, params.nheads, params.headdim, params.ngroups, params.dstate = sizes
    params.dtype = DTYPE_CODES[x.dtype]
    params.dt_dtype = DTYPE_CODES[dt.dtype]
    params.dt_softplus = dt_softplus
    params.dt_min = dt_min
    params.dt_max = dt_max
    params.x = x.data_ptr()
    params.x_batch_stride, params.x_len_stride, params.x_head_stride, _ = x.stride()
    params.dt = dt.data_ptr()
    params.dt_batch_stride, params.dt_len_stride, params.dt_head_stride = dt.stride()
    params.A = A.data_ptr()
    params.A_dtype = DTYPE_CODES[A.dtype]
    params.A_is_log = A_is_log
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
    if dt_bias is not None:
        params.dt_bias = dt_bias.data_ptr()
        params.dt_bias_dtype = DTYPE_CODES[dt_bias.dtype]
    if initial_states is not None:
        params.initial_state = initial_states.data_ptr()
    if seq_idx is not None:
        params.seq_idx = seq_idx.data_ptr()


def allocate_workspace(size_of, params, like):
    """Memory of as many bytes as the library asks for; returns the tensor, to be kept until the call."""
    size = size_of(params)
    if size == 0:
        return None
    workspace = like.new_empty((size,), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    return workspace
