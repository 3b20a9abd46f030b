"""Spatial-Mamba's module selective_scan_cuda_oflex_rh on mamba_ssm's kernels: the selective scan whose outputs are its
states, for CUDA and CPU tensors. What reads them, C, and the skip D are the caller's.
"""

import typing

import torch

import _mamba_ssm_finder  # noqa: F401  (before mamba_ssm, which may be a copy)
from mamba_ssm.ops.selective_scan.states import states_backward, states_forward

__all__ = ["bwd", "fwd"]


def fwd(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *arguments: typing.Any
) -> list[torch.Tensor]:
    """[states (B, D, N, L), x]; x (B, D, chunks, 2N) float32 is for bwd, and x[:, :, -1, 1::2] is the last state.

    u (B, D, L); delta (B, rows, L), whose rows divide D; A (D, N); B (B, G, N, L), (B, N, L) or (D, N).
    arguments: (C, D,) delta_bias, delta_softplus, nrows=1, out_float=True, where C and D may be left out or are None,
    since the states are what is returned. nrows has no effect. out_float: the states are float32, whatever u is.
    """
    _, delta_bias, (delta_softplus, *options) = _split("fwd", arguments, 0)
    out_float = options[1] if len(options) > 1 else True
    return states_forward(u, delta, A, B, delta_bias, bool(delta_softplus), bool(out_float))


def bwd(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *arguments: typing.Any
) -> list[torch.Tensor | None]:
    """[du, ddelta, dA, dB, (None for C and D each,) ddelta_bias].

    arguments: (C, D,) delta_bias, dout (B, D, N, L), x, delta_softplus, nrows=1.
    """
    absent, delta_bias, (dout, x, delta_softplus, *_) = _split("bwd", arguments, 2)
    *grads, ddelta_bias = states_backward(u, delta, A, B, delta_bias, dout, x, bool(delta_softplus))
    return [*grads, *absent, ddelta_bias]


def _split(
    name: str, arguments: tuple[typing.Any, ...], tensors: int
) -> tuple[list[None], torch.Tensor | None, tuple[typing.Any, ...]]:
    """(None for C and D, as far as they were given; delta_bias; the rest: so many tensors, delta_softplus, ...)."""
    flag = next((index for index, value in enumerate(arguments) if isinstance(value, int)), -1)
    if not 1 <= flag - tensors <= 3:
        raise TypeError(
            f"selective_scan_cuda_oflex_rh.{name} takes u, delta, A, B, (C, D,) delta_bias, "
            f"{'dout, x, ' if tensors else ''}delta_softplus, ..., got {4 + len(arguments)} arguments"
        )
    *absent, delta_bias = arguments[: flag - tensors]
    if any(tensor is not None for tensor in absent):
        raise ValueError(
            f"selective_scan_cuda_oflex_rh.{name}: C and D must be None: it returns the states, so multiply them by C "
            "and add D u afterwards"
        )
    return absent, delta_bias, arguments[flag - tensors :]
