"""The decode step's arguments as records, their checks, and the kernels' parameters.

Letters: B batch, T steps, H heads, P headdim (or D channels without heads), G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES

NAME = "selective_state_update"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; state is written in place."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    state_batch_indices: torch.Tensor | None


class Destinations(typing.NamedTuple):
    """Where states go that do not stay where they were; the second is written in place."""

    dst_state_batch_indices: torch.Tensor | None
    intermediate_states_buffer: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operator takes."""

    dt_softplus: bool


class Sizes(typing.NamedTuple):
    """Without heads nheads and ngroups are 1, and headdim is D; without steps seqlen is 1."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int


class _Letters(typing.NamedTuple):
    """How errors write the shapes of the state and of what there is for each step, state, channel and group."""

    state: str
    step: str
    per_state: str
    per_channel: str
    matrix: str
    buffer: str


_WITH_HEADS = _Letters("(B, H, P, N)", "(B, H, P)", "(H, P, N)", "(H, P)", "(B, G, N)", "(B, T, H, P, N)")
_WITHOUT_HEADS = _Letters("(B, D, N)", "(B, D)", "(D, N)", "(D,)", "(B, N)", "(B, T, D, N)")
_STEPS_WITH_HEADS = _WITH_HEADS._replace(step="(B, T, H, P)", matrix="(B, T, G, N)")
_STEPS_WITHOUT_HEADS = _WITHOUT_HEADS._replace(step="(B, T, D)", matrix="(B, T, N)")


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes.

    This runs at every step, so comparisons stand here and only a failure goes to the functions that explain it.
    """
    state, x, dt, A, B, C = inputs.state, inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C
    heads, several = state.dim() == 4, x.dim() == state.dim()
    letters = _WITH_HEADS if heads else _WITHOUT_HEADS
    if x.dtype not in checks.FLOAT_DTYPES or x.dim() != 2 + heads + several or state.dim() != 3 + heads:
        checks.check_activation_dtype(NAME, "x", x)
        checks.check_dims(NAME, "state", state, 3 + heads, "(B, D, N), or 4 dimensions (B, H, P, N)")
        checks.check_dims(NAME, "x", x, 2 + heads, f"{letters.step} with a state {letters.state}")
    shape, device, floats = x.shape, x.device, checks.FLOAT_DTYPES
    dstate = state.shape[-1]
    batch, seqlen = shape[0], 1
    if several:
        letters, seqlen = _STEPS_WITH_HEADS if heads else _STEPS_WITHOUT_HEADS, shape[1]
        if seqlen < 1:
            raise ValueError(f"{NAME}: x must have at least one step T of {letters.step}, got shape {tuple(shape)}")
    if heads:
        nheads, headdim = shape[-2:]
        channels, per_state = (nheads, headdim), (nheads, headdim, dstate)
    else:
        headdim, nheads = shape[-1], 1
        channels, per_state = (headdim,), (headdim, dstate)
    if A.shape != per_state and A.shape[-1:] == B.shape[-1:]:  # two against one: the state is to blame
        dstate = A.shape[-1]
        per_state = *channels, dstate
    if A.shape != per_state or A.dtype not in floats or A.device != device or not 1 <= dstate <= abi.MAX_DSTATE:
        checks.no_complex(NAME, "A", A)
        checks.check_float(NAME, "A", A, per_state, x, "x", letters.per_state)
        checks.check_dstate(NAME, dstate, abi.MAX_DSTATE)
    rows = batch if inputs.state_batch_indices is None else state.shape[0]
    if state.shape != (rows, *per_state) or state.dtype not in floats or state.device != device:
        checks.check_float(NAME, "state", state, (rows, *per_state), x, "x", letters.state)
    if not state.is_contiguous():
        checks.check_writable(NAME, "state", state)
    if dt.shape != shape or dt.dtype not in floats or dt.device != device:
        checks.check_float(NAME, "dt", dt, shape, x, "x", letters.step)
    matrix, ngroups = (*shape[: 1 + several], dstate), 1
    if heads:
        if B.dim() != 3 + several:
            checks.check_dims(NAME, "B", B, 3 + several, letters.matrix)
        ngroups = B.shape[-2]
        matrix = *shape[: 1 + several], ngroups, dstate
        if ngroups < 1 or nheads % ngroups:
            checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    if B.shape != matrix or B.dtype not in floats or B.device != device:
        checks.check_float(NAME, "B", B, matrix, x, "x", letters.matrix)
    if C.shape != matrix or C.dtype != B.dtype or C.device != device:
        checks.check_same(NAME, "C", C, matrix, B, "B", letters.matrix)
    D, z, dt_bias = inputs.D, inputs.z, inputs.dt_bias
    if D is not None and (D.shape != channels or D.dtype not in floats or D.device != device):
        checks.check_float(NAME, "D", D, channels, x, "x", letters.per_channel)
    if z is not None and (z.shape != shape or z.dtype != x.dtype or z.device != device):
        checks.check_same(NAME, "z", z, shape, x, "x", letters.step)
    if dt_bias is not None and (dt_bias.shape != channels or dt_bias.dtype not in floats or dt_bias.device != device):
        checks.check_float(NAME, "dt_bias", dt_bias, channels, x, "x", letters.per_channel)
    if inputs.state_batch_indices is not None:
        checks.check_index(NAME, "state_batch_indices", inputs.state_batch_indices, (batch,), x, "x", "(B,)")
    return Sizes(batch, seqlen, nheads, headdim, dstate, ngroups)


def check_destinations(sizes, inputs, destinations):
    """Raises on any of the destinations that the kernels do not take."""
    rows, buffer = destinations
    if rows is not None:
        checks.check_index(NAME, "dst_state_batch_indices", rows, (sizes.batch,), inputs.x, "x", "(B,)")
    if buffer is not None:
        shape = sizes.batch, sizes.seqlen, *inputs.state.shape[1:]
        letters = _WITH_HEADS if inputs.state.dim() == 4 else _WITHOUT_HEADS
        checks.check_same(NAME, "intermediate_states_buffer", buffer, shape, inputs.state, "state", letters.buffer)
        checks.check_writable(NAME, "intermediate_states_buffer", buffer)


def fill(params, sizes, inputs, options, out):
    """Sets all fields but the run's. Without heads the strides of heads stay 0."""
    state, x, dt, A, B, C = inputs.state, inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C
    D, z, dt_bias = inputs.D, inputs.z, inputs.dt_bias
    heads = state.dim() == 4
    if x.dim() == state.dim():
        params.x_len_stride, params.dt_len_stride, params.out_len_stride = x.stride(1), dt.stride(1), out.stride(1)
        params.B_len_stride, params.C_len_stride = B.stride(1), C.stride(1)
        x, dt, B, C, out = (tensor.select(1, 0) for tensor in (x, dt, B, C, out))
        if z is not None:
            params.z_len_stride, z = z.stride(1), z.select(1, 0)
    params.batch, params.seqlen, params.nheads, params.headdim, params.dstate, params.ngroups = sizes
    params.dt_softplus = options.dt_softplus
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
    if heads:
        strides = state.stride()
        params.state_row_stride, params.state_head_stride, params.state_dim_stride, params.state_dstate_stride = strides
        params.x_batch_stride, params.x_head_stride, params.x_dim_stride = x.stride()
        params.dt_batch_stride, params.dt_head_stride, params.dt_dim_stride = dt.stride()
        params.A_head_stride, params.A_dim_stride, params.A_dstate_stride = A.stride()
        params.B_batch_stride, params.B_group_stride, params.B_dstate_stride = B.stride()
        params.C_batch_stride, params.C_group_stride, params.C_dstate_stride = C.stride()
        params.out_batch_stride, params.out_head_stride, params.out_dim_stride = out.stride()
    else:
        params.state_row_stride, params.state_dim_stride, params.state_dstate_stride = state.stride()
        params.x_batch_stride, params.x_dim_stride = x.stride()
        params.dt_batch_stride, params.dt_dim_stride = dt.stride()
        params.A_dim_stride, params.A_dstate_stride = A.stride()
        params.B_batch_stride, params.B_dstate_stride = B.stride()
        params.C_batch_stride, params.C_dstate_stride = C.stride()
        params.out_batch_stride, params.out_dim_stride = out.stride()
    if D is not None:
        params.D = D.data_ptr()
        params.D_dtype = DTYPE_CODES[D.dtype]
        if heads:
            params.D_head_stride, params.D_dim_stride = D.stride()
        else:
            (params.D_dim_stride,) = D.stride()
    if z is not None:
        params.z = z.data_ptr()
        if heads:
            params.z_batch_stride, params.z_head_stride, params.z_dim_stride = z.stride()
        else:
            params.z_batch_stride, params.z_dim_stride = z.stride()
    if dt_bias is not None:
        params.dt_bias = dt_bias.data_ptr()
        params.dt_bias_dtype = DTYPE_CODES[dt_bias.dtype]
        if heads:
            params.dt_bias_head_stride, params.dt_bias_dim_stride = dt_bias.stride()
        else:
            (params.dt_bias_dim_stride,) = dt_bias.stride()


def fill_buffer(params, buffer):
    """Sets the fields of intermediate_states_buffer, (B, T, ...) like the state."""
    params.step_states = buffer.data_ptr()
    params.step_states_batch_stride, params.step_states_len_stride, *head, dim, dstate = buffer.stride()
    params.step_states_dim_stride, params.step_states_dstate_stride = dim, dstate
    if head:
        (params.step_states_head_stride,) = head
