"""Decode steps that return a new state and can be differentiated: for training through a step."""

import typing

import torch

from mamba_ssm._torch import reference
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.selective_scan import selective_scan_fn
from mamba_ssm.ops.state_update.arguments import Inputs, check


def selective_state_step(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """selective_state_update that leaves state as it is and returns the new one: (out, new state).

    For recurrent training and reinforcement learning, where gradients flow from one step to those before it. It is a
    selective scan over the steps, in float32, and has all of that one's derivatives. To decode without them,
    selective_state_update is faster and allocates no state.

    Args: as for selective_state_update: one step, or several in a dimension T.

    Returns:
        out of x's shape and dtype, and the state after the last step, of state's shape and dtype.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape or a device is wrong.
    """
    if not reference.on:
        check(Inputs(state.contiguous(), x, dt, A, B, C, D, z, dt_bias, None))
    dtype, several, heads = working_dtype(x), x.dim() == state.dim(), state.dim() == 4
    batch, dstate = x.shape[0], state.shape[-1]

    def channels(tensor):
        """x, dt or z as (B, D, T)."""
        if tensor is None:
            return None
        tensor = tensor.to(dtype) if several else tensor.to(dtype).unsqueeze(1)
        return tensor.flatten(2).transpose(1, 2)

    def matrix(tensor):
        """B or C as (B, G, N, T)."""
        tensor = tensor.to(dtype) if several else tensor.to(dtype).unsqueeze(1)
        return (tensor if heads else tensor.unsqueeze(2)).permute(0, 2, 3, 1)

    def parameter(tensor):
        return None if tensor is None else tensor.to(dtype).flatten()

    u, delta, gate = channels(x), channels(dt), channels(z)
    initial_state = state.to(dtype).reshape(batch, u.shape[1], dstate)
    inputs = u, delta, A.to(dtype).reshape(-1, dstate), matrix(B), matrix(C), parameter(D), gate, parameter(dt_bias)
    out, last_state = typing.cast(
        tuple[torch.Tensor, torch.Tensor], selective_scan_fn(*inputs, bool(dt_softplus), True, initial_state)
    )
    return out.transpose(1, 2).reshape(x.shape).to(x.dtype), last_state.reshape(state.shape).to(state.dtype)
