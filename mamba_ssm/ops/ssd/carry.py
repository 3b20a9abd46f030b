"""A scan whose sequence lies on several devices: what this part passes on, and how its pieces get their first states.

The part is cut into pieces of one length, which the kernels scan as if they were more rows of the batch. Each passes on
its last state from zero, which a walk of the states alone computes. Then each piece is scanned once, from its initial
state. A long sequence on one device is cut into segments in the same way.
Letters: B batch, K pieces, S steps of a piece, H heads, P headdim, N dstate.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm._native.launch import View
from mamba_ssm._torch import make
from mamba_ssm.ops.ssd.arguments import Inputs, Options
from mamba_ssm.ops.ssd.forward import launch_forward

_MOST_PIECES = 32  # with the heads of any model they fill a GPU; each keeps two states
_LEAST_STEPS = 512  # of a piece: 8 chunks

_Sizes = typing.TypeVar("_Sizes", bound=typing.Any)


def cut_length(sizes: _Sizes) -> _Sizes:
    """The sizes of the pieces, batch B K and seqlen S, for launchers. A length without divisors is one piece."""
    most = min(_MOST_PIECES, sizes.seqlen // _LEAST_STEPS)
    pieces = next((pieces for pieces in range(most, 1, -1) if sizes.seqlen % pieces == 0), 1)
    return sizes._replace(batch=sizes.batch * pieces, seqlen=sizes.seqlen // pieces)


def steps_of(dt: torch.Tensor, dt_bias: torch.Tensor, options: typing.Any, sizes: _Sizes) -> torch.Tensor:
    """The step sizes, (B, K, H, S) float32, from dt (B, L, H), whose softplus they are. dt_bias (H) float32.

    sizes: of the pieces.
    """
    batch, seqlen, heads = dt.shape
    pieces = seqlen // max(sizes.seqlen, 1) or 1
    steps = dt_bias.new_empty((batch, pieces, heads, sizes.seqlen))  # contiguous: torch sums up others slowly
    torch.add(dt.unflatten(1, (pieces, sizes.seqlen)).transpose(2, 3), dt_bias[:, None], out=steps)
    steps = F.softplus(steps)
    if (options.dt_min, options.dt_max) != (0.0, float("inf")):
        steps.clamp_(options.dt_min, options.dt_max)
    return steps


def factors_of(steps: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """By what each piece multiplies the state that it starts from, (B, K, H). A (H) float32."""
    return steps.sum(3).mul_(A).exp_()


def decays_of(steps: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """The product of the decays of a step and all before it in its piece, (B, K, H, S)."""
    return steps.cumsum(3).mul_(A[:, None]).exp_()


def last_states(sizes: _Sizes, inputs: Inputs, options: typing.Any) -> torch.Tensor:
    """The state after the last step of each piece if it starts from zero, (B K, H, P, N) float32; see ops/carry.py.

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
