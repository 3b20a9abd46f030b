"""A scan whose sequence lies on several devices: what this part passes on, and how its pieces take what comes.

The part is cut into pieces of one length, which the kernels scan as if they were more rows of the batch. What each
passes on, its last state from zero, takes a walk of the states alone. Then each piece is scanned once, from the right
state: a long sequence that is scanned by itself is cut into segments in the same way.
Letters: B batch, K pieces, S steps of a piece, H heads, P headdim, N dstate.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm._native import abi
from mamba_ssm._native.launch import View, place, pointer, run
from mamba_ssm._torch import make
from mamba_ssm.ops.ssd.arguments import Inputs, Options
from mamba_ssm.ops.ssd.forward import launch_forward

_MOST_PIECES = 16  # with the heads of any model they fill a GPU; each keeps two states
_LEAST_STEPS = 512  # of a piece: 8 chunks

_Sizes = typing.TypeVar("_Sizes", bound=typing.Any)


def cut_length(sizes: _Sizes) -> _Sizes:
    """The sizes of the pieces, batch B K and seqlen S, for launchers. A length without divisors is one piece."""
    most = min(_MOST_PIECES, sizes.seqlen // _LEAST_STEPS)
    pieces = next((pieces for pieces in range(most, 1, -1) if sizes.seqlen % pieces == 0), 1)
    return sizes._replace(batch=sizes.batch * pieces, seqlen=sizes.seqlen // pieces)


def decays_of(
    dt: torch.Tensor, dt_bias: torch.Tensor, A: torch.Tensor, options: typing.Any, sizes: _Sizes
) -> torch.Tensor:
    """The product of the decays of a step and all before it in its piece, (B, K, H, S) float32.

    dt (B, L, H), whose softplus is the step size; dt_bias and A (H) float32; sizes: of the pieces.
    """
    batch, seqlen, heads = dt.shape
    pieces = seqlen // max(sizes.seqlen, 1) or 1
    steps = A.new_empty((batch, pieces, heads, sizes.seqlen))  # contiguous: torch sums up other dimensions slowly
    torch.add(dt.unflatten(1, (pieces, sizes.seqlen)).transpose(2, 3), dt_bias[:, None], out=steps)
    steps = F.softplus(steps)
    if (options.dt_min, options.dt_max) != (0.0, float("inf")):
        steps.clamp_(options.dt_min, options.dt_max)
    return steps.cumsum(3).mul_(A[:, None]).exp_()


def factors_of(decays: torch.Tensor) -> torch.Tensor:
    """By what each piece multiplies the state that it starts from, (B, K, H)."""
    return decays[..., -1] if decays.shape[3] else decays.new_ones(decays.shape[:3])


def last_states(sizes: _Sizes, inputs: Inputs, options: typing.Any) -> torch.Tensor:
    """The state after the last step of each piece if it starts from zero, (B K, H, P, N) float32.

    sizes, inputs, options: of the pieces, as launch_forward takes them; without initial states. There is a step.
    """
    states = inputs.A.new_empty(sizes.states, dtype=torch.float32)
    launch_forward(sizes, inputs, options, None, states)
    return states


def first_gradients(sizes: _Sizes, dout: View, C: View, decays: torch.Tensor) -> torch.Tensor:
    """The gradient of the state before the first step of each piece if none comes from later ones, as last_states.

    It is the sum over steps of decays * dout C^T, and so the last state of a scan that forgets nothing: with decays for
    dt, and A = 0.
    """
    nothing_forgotten = decays.new_zeros(decays.shape[2])
    scan = dout, decays.flatten(0, 1).transpose(1, 2), nothing_forgotten, C, C, None, None, None, None, None
    return last_states(sizes, make(Inputs, scan), Options(False, 0.0, float("inf")))


def passed_on(passed: torch.Tensor, factors: torch.Tensor, from_end: bool = False) -> torch.Tensor:
    """What the pieces pass on together, (B H P N + B H): the state behind the last one, from zero on, and
    the products of their factors.

    passed (B K, H, P, N): by each piece; factors (B, K, H). from_end: to the pieces before, as gradients go.
    """
    states = factors.shape[0] * passed.shape[1:].numel()
    together = passed.new_empty(states + factors.shape[0] * factors.shape[2])
    params = _of_pieces(passed, factors, from_end)
    params.last, params.product = together.data_ptr(), View(together, states).data_ptr()
    run(place(params, passed), "ssd_carry", params)
    return together


def fold(everyone: torch.Tensor, shape: torch.Size, from_end: bool = False) -> torch.Tensor:
    """The state (B, H, P, N) behind parts that follow one another, from what each passes on (parts, B H P N + B H)."""
    together = everyone.new_empty(shape)
    params = abi.MambaSsdCarry()
    params.batch, params.nheads, headdim, dstate = shape
    params.pieces, params.state_size, params.reverse = everyone.shape[0], headdim * dstate, from_end
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
    """The state before each piece, (B K, H, P, N) as launchers take it. passed, factors: as passed_on takes them.

    outer (B, H, P, N): the state before the first piece, or from_end, the gradient of that behind the last. None: zero.
    """
    before = torch.empty_like(passed)
    params = _of_pieces(passed, factors, from_end)
    params.initial, params.before = pointer(outer), before.data_ptr()
    run(place(params, passed), "ssd_carry", params)
    return before


def _of_pieces(passed: torch.Tensor, factors: torch.Tensor, from_end: bool) -> abi.MambaSsdCarry:
    params = abi.MambaSsdCarry()
    params.batch, params.pieces, params.nheads = factors.shape
    params.state_size, params.reverse = passed.shape[2] * passed.shape[3], from_end
    params.passed, params.factors = passed.data_ptr(), factors.data_ptr()
    params.passed_batch_stride, params.passed_piece_stride = params.pieces * passed.stride(0), passed.stride(0)
    params.factors_batch_stride, params.factors_piece_stride, params.factors_head_stride = factors.stride()
    return params
