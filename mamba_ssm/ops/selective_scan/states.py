"""The selective scan whose outputs are its states, for selective_scan_cuda_oflex_rh: each state of a channel is a
channel of its own with one state, and C is one.

Letters: B batch, D channels, L length, N dstate, G groups of B, c channels of a group.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm.ops.selective_scan.arguments import NAME
from mamba_ssm.ops.selective_scan.extension import backward, forward, row_for_each_channel, summed


class _Inputs(typing.NamedTuple):
    """Of the scan with a channel for each state, in the order (G, N, c): B's groups are its states."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    delta_bias: torch.Tensor | None
    sizes: tuple[int, int, int]  # G, N, c


def states_forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    out_float: bool,
) -> list[torch.Tensor]:
    """[states (B, D, N, L), x (B, D, chunks, 2N) float32], of flexible_forward's arguments. x[:, :, -1, 1::2] is the
    last state. With N = 1 backward needs no second scan, thanks to x.
    """
    inputs: _Inputs = _by_state(u, delta, A, B, delta_bias, out_float)
    given = inputs.u, inputs.delta, inputs.A, inputs.B
    out, x = forward(*given, _ones(inputs.A), None, inputs.delta_bias, delta_softplus)
    if inputs.sizes[1] > 1:  # for N = 1 x is handed back as it is, since its memory holds more
        x = _by_channel(x.flatten(2), inputs.sizes).unflatten(3, (-1, 2)).transpose(2, 3).flatten(3)
    return [_by_channel(out, inputs.sizes), x]


def states_backward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor,
    delta_softplus: bool,
) -> list[torch.Tensor | None]:
    """[du, ddelta, dA, dB, ddelta_bias], each as its input. dout (B, D, N, L) may be float32, whatever u is."""
    checks.check_tensor(NAME, "dout", dout)
    inputs: _Inputs = _by_state(u, delta, A, B, delta_bias, dout.dtype == torch.float32)
    groups, dstate, channels = inputs.sizes
    (batch, dim, seqlen), shape = u.shape, (u.shape[0], u.shape[1], dstate, u.shape[2])
    if dout.shape != shape:
        raise ValueError(f"{NAME}: dout must have shape (B, D, N, L) = {shape}, got {tuple(dout.shape)}")
    checks.check_dims(NAME, "x", x, 4, "(B, D, chunks, 2N)")
    dout = dout.reshape(batch, groups, channels, dstate, seqlen).transpose(2, 3).reshape(batch, dstate * dim, seqlen)
    x = x if dstate == 1 else x.reshape(batch, dim * dstate, -1, 2)
    given = inputs.u, inputs.delta, inputs.A, inputs.B, _ones(inputs.A), None, None, inputs.delta_bias
    grads = backward(*given, dout.to(inputs.u.dtype), x, delta_softplus)

    def over_states(gradient, begin):
        """The sum over N, which lies behind G at dimension begin."""
        return gradient.unflatten(begin, inputs.sizes).float().sum(begin + 1).flatten(begin, begin + 1)

    dA = grads.dA.view(inputs.sizes).transpose(1, 2).reshape(dim, dstate)
    dB = grads.dB.view(inputs.sizes).transpose(1, 2).reshape(B.shape) if B.dim() == 2 else grads.dB.reshape(B.shape)
    bias = None if delta_bias is None else summed(over_states(grads.ddelta_bias, 0), delta_bias)
    du, ddelta = over_states(grads.du, 1), over_states(grads.ddelta, 1)
    return [summed(du, u), summed(ddelta, delta), dA, dB.to(B.dtype), bias]


def _by_state(u, delta, A, B, delta_bias, wide):
    delta, delta_bias = row_for_each_channel(u, delta, delta_bias)
    checks.check_dims(NAME, "A", A, 2, "(D, N)")
    checks.check_tensor(NAME, "B", B)
    if A.shape[0] != u.shape[1]:
        raise ValueError(f"{NAME}: A must have the {u.shape[1]} channels of u, got shape {tuple(A.shape)}")
    (dim, dstate), groups = A.shape, B.shape[1] if B.dim() == 4 else 1
    checks.check_groups(NAME, "dim (channels of u)", dim, groups)
    sizes = groups, dstate, dim // groups
    if B.dim() in (3, 4):
        checks.check_same(NAME, "B", B, _shape_of_B(u, B, sizes), u, "u", "(B, G, N, L) or (B, N, L)")
    else:
        checks.check_float32(NAME, "B", B, (dim, dstate), u, "u", "(D, N)")
    if delta_bias is not None:
        checks.check_float32(NAME, "delta_bias", delta_bias, (dim,), u, "u", "(D), or one for each row of delta")

    def repeated(rows, begin):
        """One for each state of a channel, which lies at dimension begin."""
        spread = rows.unflatten(begin, (groups, 1, sizes[2]))
        return spread.expand(*rows.shape[:begin], *sizes, *rows.shape[begin + 1 :]).flatten(begin, begin + 2)

    def by_state(matrix):
        """(D, N) as (G N c, 1)."""
        return matrix.reshape(groups, sizes[2], dstate).transpose(1, 2).reshape(-1, 1)

    matrix = by_state(B) if B.dim() == 2 else B.reshape(B.shape[0], groups * dstate, 1, B.shape[-1])
    u, delta = repeated(u, 1), repeated(delta, 1)
    if wide:
        u, delta, matrix = u.float(), delta.float(), matrix.float()
    return _Inputs(u, delta, by_state(A), matrix, None if delta_bias is None else repeated(delta_bias, 0), sizes)


def _shape_of_B(u, B, sizes):
    groups, dstate, _ = sizes
    return (u.shape[0], groups, dstate, u.shape[2]) if B.dim() == 4 else (u.shape[0], dstate, u.shape[2])


def _ones(A):
    return torch.ones_like(A, memory_format=torch.contiguous_format)


def _by_channel(rows, sizes):
    """(B, G N c, ...) as (B, D, N, ...)."""
    return rows.unflatten(1, sizes).transpose(2, 3).flatten(1, 2)
