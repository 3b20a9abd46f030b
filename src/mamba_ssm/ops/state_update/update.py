"""One decode step of the selective state space model, for Mamba-1 and Mamba-2 states; the state is updated in place.

state = exp(dt A) state + dt B x;  out = (C . state + D x) silu(z).
Letters: B batch, H heads, P headdim (or D channels without heads), N dstate.
"""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import call, define, reference, signature, unpack, wrote_in_place
from mamba_ssm.ops._shared.indices import cache_rows
from mamba_ssm.ops.state_update.arguments import NAME, Inputs, Options, check, fill
from mamba_ssm.ops.state_update.reference import selective_state_update_ref


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
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
        out of x's shape and dtype, without a gradient: out and the new state are detached, and a warning says so where
        an input requires one and grad mode is on.

    Same as upstream's mamba_ssm.ops.triton.selective_state_update.selective_state_update.
    """
    if reference.on:
        return selective_state_update_ref(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)
    arguments = state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, bool(dt_softplus)
    return call(selective_state_update_op, *arguments)


def _update(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    sizes, state = check(inputs), inputs.state
    out = torch.empty_like(inputs.x)
    if out.numel() == 0:
        return out
    params = abi.MambaSelectiveStateUpdate()
    functions = place(params, out)
    fill(params, sizes, inputs, options, out)
    rows = inputs.state_batch_indices
    if rows is not None:
        rows = cache_rows(NAME, "state_batch_indices", rows, state.shape[0])
        params.state_batch_indices = rows.data_ptr()
    run(functions, "selective_state_update", params)
    wrote_in_place(state)
    return out


def _update_fake(*arguments):
    inputs, _ = unpack(arguments, Inputs, Options)
    check(inputs)
    return torch.empty_like(inputs.x)


selective_state_update_op = define(
    f"selective_state_update({signature(Inputs, Options, written=['state'])}) -> Tensor",
    _update,
    _update_fake,
    differentiable=False,
)
