"""Decode steps of the selective state space model, one or a few, for Mamba-1 and Mamba-2 states; the state is updated.

state = exp(dt A) state + dt B x;  out = (C . state + D x) silu(z).
Letters: B batch, T steps, H heads, P headdim (or D channels without heads), G groups of B and C, N dstate.
"""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import call, define, reference, signature, unpack, wrote_in_place
from mamba_ssm.ops._shared.indices import cache_rows, check_rows_of_others
from mamba_ssm.ops.state_update.arguments import (
    NAME,
    Destinations,
    Inputs,
    Options,
    check,
    check_destinations,
    fill,
)
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
    *,
    dst_state_batch_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decode step, or several one after the other; writes the new state into state.

    Args (float32, float16 or bfloat16 each; N is 1..256):
        state: (B, D, N), or (B, H, P, N); with state_batch_indices its first dimension is the number of rows.
        x, dt, z: (B, D) or (B, H, P); z, of x's dtype, gates the output with silu(z).
        A: (D, N) or (H, P, N). D, dt_bias: (D) or (H, P). dt, A, D and dt_bias may be stride-0 expansions.
        B, C: (B, N) or (B, G, N), where G divides H; of one dtype.
        dt_softplus: dt = softplus(dt + dt_bias).
        state_batch_indices: (B) int32 or int64, the row of state for each entry of x. A negative row is padding: its
            output is zero, and nothing else is written. A row beyond the state or named twice is an error on the CPU;
            on a GPU, where looking at the values would synchronise, the output of a row beyond is NaN and no state is
            touched, and entries that name the same row race: its state and their outputs are then undefined.
        dst_state_batch_indices: (B) int32 or int64, the row that takes an entry's new state, which then does not go
            where the old one was read: that row is only read, and may be read by several entries. A negative row: the
            new state is dropped. For rows beyond, named twice, or read by another entry the same holds as above.
        intermediate_states_buffer: (B, T, D, N) or (B, T, H, P, N) of state's dtype, written with the state after each
            step: speculative decoding rolls back to that of the last token it accepts. Padding's is left as it is.

    Several steps: x, dt and z are (B, T, D) or (B, T, H, P), B and C (B, T, N) or (B, T, G, N). The state is rounded to
    its dtype where it is stored, not between steps.

    Returns:
        out of x's shape and dtype, without a gradient: out and the new state are detached, and a warning says so where
        an input requires one and grad mode is on. selective_state_step returns the new state instead, with a gradient.

    Same as upstream's mamba_ssm.ops.triton.selective_state_update.selective_state_update; several steps and what
    follows state_batch_indices are new beside it.
    """
    inputs = state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices
    destinations = dst_state_batch_indices, intermediate_states_buffer
    if reference.on:
        return selective_state_update_ref(
            *inputs[:-1],
            dt_softplus,
            state_batch_indices,
            dst_state_batch_indices=dst_state_batch_indices,
            intermediate_states_buffer=intermediate_states_buffer,
        )
    if dst_state_batch_indices is None and intermediate_states_buffer is None:
        return call(selective_state_update_op, *inputs, bool(dt_softplus))
    return call(selective_state_update_to_op, *inputs, *destinations, bool(dt_softplus))


def _update(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    return _run(inputs, options, Destinations(None, None))


def _update_to(*arguments):
    inputs, destinations, options = unpack(arguments, Inputs, Destinations, Options)
    return _run(inputs, options, destinations)


def _run(inputs, options, destinations):
    sizes, state = check(inputs), inputs.state
    check_destinations(sizes, inputs, destinations)
    out = torch.empty_like(inputs.x)
    if out.numel() == 0:
        return out
    params = abi.MambaSelectiveStateUpdate()
    functions = place(params, out)
    sources, (targets, buffer) = inputs.state_batch_indices, destinations
    fill(params, sizes, inputs, options, out, buffer)
    if sources is not None:
        sources = cache_rows(NAME, "state_batch_indices", sources, state.shape[0], only_read=targets is not None)
        params.state_batch_indices = sources.data_ptr()
    if targets is not None:
        targets = cache_rows(NAME, "dst_state_batch_indices", targets, state.shape[0])
        check_rows_of_others(NAME, "dst_state_batch_indices", targets, sources)
        params.dst_state_batch_indices = targets.data_ptr()
    run(functions, "selective_state_update", params)
    wrote_in_place(state)
    if buffer is not None:
        wrote_in_place(buffer)
    return out


def _update_fake(*arguments):
    inputs, _ = unpack(arguments, Inputs, Options)
    check(inputs)
    return torch.empty_like(inputs.x)


def _update_to_fake(*arguments):
    inputs, destinations, _ = unpack(arguments, Inputs, Destinations, Options)
    check_destinations(check(inputs), inputs, destinations)
    return torch.empty_like(inputs.x)


selective_state_update_op = define(
    f"selective_state_update({signature(Inputs, Options, written=['state'])}) -> Tensor",
    _update,
    _update_fake,
    differentiable=False,
    planned=(),
)
_WRITTEN = "state", "intermediate_states_buffer?"
selective_state_update_to_op = define(
    f"selective_state_update_to({signature(Inputs, Destinations, Options, written=_WRITTEN)}) -> Tensor",
    _update_to,
    _update_to_fake,
    differentiable=False,
    called=NAME,
    planned=(),
)
