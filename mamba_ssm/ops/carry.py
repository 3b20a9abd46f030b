"""How parts of a sequence that lie on different devices, and pieces of such a part, pass on their states.

A scan is linear in its state: a part that follows another one ends with what it would end with from zero, and a factor
times the state that it starts from. Letters: B batch, K pieces, H heads, S elements of a state that share a factor.
"""

import typing

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import View, place, pointer, run


class Neighbours(typing.Protocol):
    """The parts before and behind this one, to whoever computes this one. Every part calls these in this order."""

    def send_inputs(self, x: torch.Tensor, steps: int) -> None:
        """Starts to pass on the last steps of the convolution's input x (B, channels, L)."""

    def inputs_before(self) -> torch.Tensor:
        """The inputs before x, (B, channels, steps) of its dtype."""

    def state_before(self, passed_on: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """The state before this part, of shape (B, H, ...); None: zero. passed_on: what this part passes on."""

    def gradient_after(self, passed_on: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """The gradient of the state behind this part, in the same way."""

    def add_input_gradients(self, dbefore: torch.Tensor, dx: torch.Tensor) -> None:
        """Passes back the gradient of inputs_before's result; adds what comes for x to dx."""


def passed_on(passed: torch.Tensor, factors: torch.Tensor, from_end: bool = False) -> torch.Tensor:
    """What pieces pass on together, (B H S + B H): the state behind the last one, from zero on, and the products of
    their factors.

    passed (B, K, H, S): by each piece, whose elements are neighbours in memory; factors (B, K, H). from_end: to the
    pieces before, as gradients go.
    """
    states = passed.shape[0] * passed.shape[2] * passed.shape[3]
    together = passed.new_empty(states + passed.shape[0] * passed.shape[2])
    params = _of_pieces(passed, factors, from_end)
    params.last, params.product = together.data_ptr(), View(together, states).data_ptr()
    run(place(params, passed), "ssd_carry", params)
    return together


def nothing_passed_on(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """passed_on of a part without steps: states of zero, of shape (B, H, ...), and factors of one."""
    together = like.new_ones(shape.numel() + shape[:2].numel(), dtype=torch.float32)
    together[: shape.numel()] = 0
    return together


def fold(everyone: torch.Tensor, shape: torch.Size, from_end: bool = False) -> torch.Tensor:
    """The state (B, H, ...) behind parts that follow one another, from what each passes on (parts, B H S + B H)."""
    together = everyone.new_empty(shape)
    params = abi.MambaSsdCarry()
    params.batch, params.nheads, params.state_size = shape[0], shape[1], shape[2:].numel()
    params.pieces, params.reverse = everyone.shape[0], from_end
    params.passed, params.factors = everyone.data_ptr(), View(everyone, shape.numel()).data_ptr()
    params.passed_batch_stride, params.factors_batch_stride = shape[1:].numel(), shape[1]
    params.passed_piece_stride = params.factors_piece_stride = everyone.stride(0)
    params.factors_head_stride = 1
    params.last = together.data_ptr()
    run(place(params, everyone), "ssd_carry", params)
    return together


def reaching(
    passed: torch.Tensor, factors: torch.Tensor, outer: torch.Tensor | None, from_end: bool = False
) -> torch.Tensor:
    """The state before each piece, (B, K, H, S). passed, factors: as passed_on takes them.

    outer (B, H, ...): the state before the first piece, or from_end, the gradient of that behind the last. None: zero.
    """
    before = passed.new_empty(passed.shape)
    params = _of_pieces(passed, factors, from_end)
    params.initial, params.before = pointer(outer), before.data_ptr()
    run(place(params, passed), "ssd_carry", params)
    return before


def _of_pieces(passed: torch.Tensor, factors: torch.Tensor, from_end: bool) -> abi.MambaSsdCarry:
    params = abi.MambaSsdCarry()
    params.batch, params.pieces, params.nheads, params.state_size = passed.shape
    params.reverse = from_end
    params.passed, params.factors = passed.data_ptr(), factors.data_ptr()
    params.passed_batch_stride, params.passed_piece_stride = passed.stride()[:2]
    params.factors_batch_stride, params.factors_piece_stride, params.factors_head_stride = factors.stride()
    return params
