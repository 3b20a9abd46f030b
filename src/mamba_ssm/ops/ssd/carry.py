"""A scan whose sequence lies on several devices: what this part passes on, and how its pieces take what comes.

The part is cut into pieces of one length, which the kernels scan as if they were more rows of the batch. What each
passes on, its last state from zero, takes a walk of the states alone. Then each piece is scanned once, from the right
state: a long sequence that is scanned by itself is cut into segments in the same way.
Letters: B batch, K pieces, S steps of a piece, H heads, P headdim, N dstate.
"""

import itertools
import typing

import torch
import torch.nn.functional as F

from mamba_ssm._native.launch import View
from mamba_ssm._torch import make
from mamba_ssm.ops.ssd.arguments import Inputs, Options
from mamba_ssm.ops.ssd.forward import launch_forward

_MOST_PIECES = 16  # with the heads of any model they fill a GPU; each is a few launches and keeps two states
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
    """By what each piece multiplies the state that it starts from, (B, K, H, 1, 1)."""
    factors = decays[..., -1] if decays.shape[3] else decays.new_ones(decays.shape[:3])
    return factors[..., None, None]


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


def fold(passed: torch.Tensor, factors: torch.Tensor, from_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What reaches each piece from those before it, (B, K, H, P, N), and what all pass on, (B, H, P, N).

    passed (B K, H, P, N): by each piece; factors (B, K, H, 1, 1). from_end: to the pieces before, as gradients go.
    """
    passed = passed.unflatten(0, factors.shape[:2])
    order = range(factors.shape[1])[:: -1 if from_end else 1]
    reaching = torch.empty_like(passed)
    reaching[:, order[0]] = 0
    for piece, following in itertools.pairwise(order):
        given = passed[:, piece], factors[:, piece], reaching[:, piece]
        torch.addcmul(*given, out=reaching[:, following])
    last = order[-1]
    return reaching, torch.addcmul(passed[:, last], factors[:, last], reaching[:, last])


def add_outer(
    reaching: torch.Tensor, factors: torch.Tensor, outer: torch.Tensor | None, from_end: bool = False
) -> torch.Tensor:
    """reaching as launchers take it, (B K, H, P, N), with what reaches each piece of `outer` (B, H, P, N) added: the
    state before the part, or the gradient of the state behind it. None: zero.
    """
    if outer is not None:
        factors = factors.flip(1) if from_end else factors
        within = torch.cat([torch.ones_like(factors[:, :1]), factors[:, :-1]], dim=1).cumprod(1)
        reaching.addcmul_(within.flip(1) if from_end else within, outer[:, None])
    return reaching.flatten(0, 1)
