"""Steps of the causal convolution that return a new state and can be differentiated: for training through a step."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import reference
from mamba_ssm.ops.causal_conv1d.arguments import check_conv_state, check_weight
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_fn

_NAME = "causal_conv1d_step"


def causal_conv1d_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal_conv1d_update that leaves conv_state as it is and returns the new one: (out, new state).

    For recurrent training and reinforcement learning, where gradients flow from one step to those before it; it has all
    derivatives of causal_conv1d_fn. To decode without them, causal_conv1d_update is faster.

    Args: as for causal_conv1d_update; the newest input of conv_state is the last one.

    Returns:
        out of x's shape and dtype, and the last S inputs, of conv_state's shape and dtype.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, a device or activation is wrong.
    """
    if not reference.on:
        _check(x, conv_state, weight, bias)
    dtype = torch.promote_types(x.dtype, conv_state.dtype)
    steps = (x if x.dim() == 3 else x.unsqueeze(2)).to(dtype)
    line = torch.cat([conv_state.to(dtype), steps], dim=2)
    state_len, before = conv_state.shape[2], weight.shape[1] - 1
    initial_states = line[:, :, state_len - before : state_len]
    out = causal_conv1d_fn(steps, weight, bias, initial_states=initial_states, activation=activation)
    new_state = line[:, :, line.shape[2] - state_len :]
    return typing.cast(torch.Tensor, out).reshape(x.shape).to(x.dtype), new_state.to(conv_state.dtype)


def _check(x, conv_state, weight, bias):
    checks.check_tensor(_NAME, "x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"{_NAME}: x must be (B, D) or (B, D, L), got shape {tuple(x.shape)}")
    checks.check_activation_dtype(_NAME, "x", x)
    width = check_weight(_NAME, x, x.shape[1], weight, bias)
    check_conv_state(_NAME, conv_state.contiguous(), x.shape[0], x.shape[1], width, x, "x")
