"""One decode step of the selective state space model, for Mamba-1 and Mamba-2 states; the state is updated in place.

state = exp(dt A) state + dt B x;  out = (C . state + D x) silu(z).
Letters: B batch, H heads, P headdim (or D channels without heads), N dstate.
"""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import call, define, wrote_in_place
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops._shared.indices import cache_rows

_NAME = "selective_state_update"


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    """One decode step; writes the new state into state.

    Args (float32, float16 or bfloat16 each; N is 1..256):
        state: (B, D, N), or (B, H, P, N); with state_batch_indices its first dimension is the number of rows.
        x, dt, z: (B, D) or (B, H, P); z, of x's dtype, gates the output with silu(z).
        A: (D, N) or (H, P, N). D, dt_bias: (D) or (H, P). dt, A, D and dt_bias may be stride-0 expansions.
        B, C: (B, N) or (B, G, N), where G divides H; of one dtype.
        dt_softplus: dt = softplus(dt + dt_bias).
        state_batch_indices: (B) int32 or int64, the row of state for each entry of x. A negative row is padding, its
            output zero. A row beyond the state or named twice is an error on the CPU; on a GPU, where looking at the
            values would synchronise, the output of a row beyond is NaN and no state is touched, and entries that name
            the same row race: its state and their outputs are then undefined.

    Returns:
        out of x's shape and dtype. There is no gradient: inputs that require one are refused.

    Same as upstream's mamba_ssm.ops.triton.selective_state_update.selective_state_update.
    """
    arguments = state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, bool(dt_softplus)
    return call(selective_state_update_op, *arguments)


def _check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices):
    """Raises on any argument that the kernels do not take; returns whether there are heads, and the sizes."""
    checks.check_activation_dtype(_NAME, "x", x)
    heads = state.dim() == 4
    if heads:
        checks.check_dims(_NAME, "x", x, 3, "(B, H, P) with a state (B, H, P, N)")
        batch, nheads, headdim = x.shape
        per_step, per_state, per_channel = "(B, H, P)", "(H, P, N)", "(H, P)"
    else:
        checks.check_dims(_NAME, "state", state, 3, "(B, D, N), or 4 dimensions (B, H, P, N)")
        checks.check_dims(_NAME, "x", x, 2, "(B, D) with a state (B, D, N)")
        (batch, headdim), nheads = x.shape, 1
        per_step, per_state, per_channel = "(B, D)", "(D, N)", "(D,)"
    channels = x.shape[1:]
    dstate = (A if A.shape[-1:] == B.shape[-1:] else state).shape[-1]  # two against one: who is to blame
    rows = batch if state_batch_indices is None else state.shape[0]
    checks.check_float(_NAME, "state", state, (rows, *channels, dstate), x, "x", f"(B, {per_state[1:]}")
    checks.check_writable(_NAME, "state", state)
    checks.check_dstate(_NAME, dstate, abi.MAX_DSTATE)
    checks.check_float(_NAME, "dt", dt, x.shape, x, "x", per_step)
    checks.no_complex(_NAME, "A", A)
    checks.check_float(_NAME, "A", A, (*channels, dstate), x, "x", per_state)
    if heads:
        checks.check_dims(_NAME, "B", B, 3, "(B, G, N)")
        ngroups = B.shape[1]
        checks.check_groups(_NAME, f"nheads ({nheads})", nheads, ngroups)
        matrix_shape, matrix_letters = (batch, ngroups, dstate), "(B, G, N)"
    else:
        ngroups, matrix_shape, matrix_letters = 1, (batch, dstate), "(B, N)"
    checks.check_float(_NAME, "B", B, matrix_shape, x, "x", matrix_letters)
    checks.check_same(_NAME, "C", C, matrix_shape, B, "B", matrix_letters)
    if D is not None:
        checks.check_float(_NAME, "D", D, channels, x, "x", per_channel)
    if z is not None:
        checks.check_same(_NAME, "z", z, x.shape, x, "x", per_step)
    if dt_bias is not None:
        checks.check_float(_NAME, "dt_bias", dt_bias, channels, x, "x", per_channel)
    if state_batch_indices is not None:
        checks.check_index(_NAME, "state_batch_indices", state_batch_indices, (batch,), x, "x", "(B,)")
    return heads, (batch, nheads, headdim, dstate, ngroups)


def _update(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, dt_softplus):
    heads, sizes = _check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    state_batch_indices = cache_rows(_NAME, "state_batch_indices", state_batch_indices, state.shape[0])
    params = abi.MambaSelectiveStateUpdate()
    functions = place(params, x)
    params.batch, params.nheads, params.headdim, params.dstate, params.ngroups = sizes
    params.dt_softplus = dt_softplus
    params.state_rows = state.shape[0]
    params.state = state.data_ptr()
    params.state_dtype = DTYPE_CODES[state.dtype]
    params.x = x.data_ptr()
    params.x_dtype = DTYPE_CODES[x.dtype]
    params.dt = dt.data_ptr()
    params.dt_dtype = DTYPE_CODES[dt.dtype]
    params.A = A.data_ptr()
    params.A_dtype = DTYPE_CODES[A.dtype]
    params.B = B.data_ptr()
    params.C = C.data_ptr()
    params.BC_dtype = DTYPE_CODES[B.dtype]
    params.out = out.data_ptr()
    if D is not None:
        params.D = D.data_ptr()
        params.D_dtype = DTYPE_CODES[D.dtype]
    if z is not None:
        params.z = z.data_ptr()
    if dt_bias is not None:
        params.dt_bias = dt_bias.data_ptr()
        params.dt_bias_dtype = DTYPE_CODES[dt_bias.dtype]
    if state_batch_indices is not None:
        params.state_batch_indices = state_batch_indices.data_ptr()
    (_strides_with_heads if heads else _strides_without_heads)(params, state, x, dt, A, B, C, D, z, dt_bias, out)
    run(functions, "selective_state_update", params)
    wrote_in_place(state)
    return out


def _strides_with_heads(params, state, x, dt, A, B, C, D, z, dt_bias, out):
    strides = state.stride()
    params.state_row_stride, params.state_head_stride, params.state_dim_stride, params.state_dstate_stride = strides
    params.x_batch_stride, params.x_head_stride, params.x_dim_stride = x.stride()
    params.dt_batch_stride, params.dt_head_stride, params.dt_dim_stride = dt.stride()
    params.A_head_stride, params.A_dim_stride, params.A_dstate_stride = A.stride()
    params.B_batch_stride, params.B_group_stride, params.B_dstate_stride = B.stride()
    params.C_batch_stride, params.C_group_stride, params.C_dstate_stride = C.stride()
    params.out_batch_stride, params.out_head_stride, params.out_dim_stride = out.stride()
    if D is not None:
        params.D_head_stride, params.D_dim_stride = D.stride()
    if z is not None:
        params.z_batch_stride, params.z_head_stride, params.z_dim_stride = z.stride()
    if dt_bias is not None:
        params.dt_bias_head_stride, params.dt_bias_dim_stride = dt_bias.stride()


def _strides_without_heads(params, state, x, dt, A, B, C, D, z, dt_bias, out):
    """One head of D channels: the head strides stay 0."""
    params.state_row_stride, params.state_dim_stride, params.state_dstate_stride = state.stride()
    params.x_batch_stride, params.x_dim_stride = x.stride()
    params.dt_batch_stride, params.dt_dim_stride = dt.stride()
    params.A_dim_stride, params.A_dstate_stride = A.stride()
    params.B_batch_stride, params.B_dstate_stride = B.stride()
    params.C_batch_stride, params.C_dstate_stride = C.stride()
    params.out_batch_stride, params.out_dim_stride = out.stride()
    if D is not None:
        (params.D_dim_stride,) = D.stride()
    if z is not None:
        params.z_batch_stride, params.z_dim_stride = z.stride()
    if dt_bias is not None:
        (params.dt_bias_dim_stride,) = dt_bias.stride()


def _update_fake(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, dt_softplus):
    _check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    return torch.empty_like(x)


selective_state_update_op = define(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, Tensor? state_batch_indices, bool dt_softplus) -> Tensor",
    _update,
    _update_fake,
    differentiable=False,
)
