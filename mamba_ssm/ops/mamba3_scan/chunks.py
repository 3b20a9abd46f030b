"""Mamba-3's scan in plain torch, chunk by chunk: products of matrices within a chunk, a state from chunk to chunk.

With cs the sum of ADT from a chunk's first step on, gamma = lambda dt and scale = gamma + what the next step adds of
this one, (1 - lambda) dt:
    y_t = sum_{s < t} exp(cs_t - cs_s) scale_s (q_t . k_s) x_s + gamma_t (q_t . k_t) x_t + exp(cs_t) h q_t
where h enters the chunk. A step has R rows of q, k and x, so that its last term but one is a block of R x R.
Letters: B batch, L length, R rank, H heads, P headdim, N dstate, S angles, C chunks, T steps of a chunk.
"""

import math

import torch
import torch.nn.functional as F

from mamba_ssm.ops.mamba3_scan.arguments import States
from mamba_ssm.ops.mamba3_scan.parts import (
    angle_steps,
    finish,
    in_working_dtype,
    outer,
    per_head,
    project,
    rotate,
    zero_states,
)

_ROWS = 64  # steps times rank


def scan_chunks(inputs, options):
    """The scan of Inputs with one sequence a row: out, States."""
    inputs = in_working_dtype(inputs)
    V, rank = inputs.V, inputs.Q.shape[2]
    batch, seqlen, heads, headdim = V.shape
    states = inputs.states or zero_states(inputs)
    if seqlen == 0:
        return finish(V.new_empty(batch, 0, rank, heads, headdim), inputs, options), states
    steps = max(_ROWS // rank, 1)

    def in_chunks(tensor):
        """(B, L, ...) as (B, C, T, ...), zero behind the end."""
        padding = [0, 0] * (tensor.dim() - 2) + [0, -seqlen % steps]
        return F.pad(tensor, padding).unflatten(1, (-1, steps))

    def in_rows(tensor):
        """(B, C, T, R, H, N or P) as (B, C, H, T R, N or P)."""
        return tensor.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)

    angle = _angles(in_chunks(angle_steps(inputs)), states.angle)
    q = per_head(inputs.Q, heads) + inputs.Q_bias.transpose(0, 1)
    k = per_head(inputs.K, heads) + inputs.K_bias.transpose(0, 1)
    q, k = (rotate(in_chunks(tensor), angle[:, :, :, None], options.pairwise) for tensor in (q, k))
    last = seqlen - 1
    finals = angle.flatten(1, 2)[:, last], k.flatten(1, 2)[:, last], V[:, last]
    x = in_chunks(project(V, inputs.MIMO_V, rank))
    lam = torch.sigmoid(inputs.Trap)
    gamma, nu = lam * inputs.DT, (1 - lam) * inputs.DT
    scale = gamma + F.pad(nu[:, 1:], (0, 0, 0, 1))
    before = project(states.v, inputs.MIMO_V, rank)
    state = states.ssm + nu[:, 0, :, None, None] * outer(before, states.k)

    gamma, scale, ADT = (in_chunks(tensor).transpose(2, 3) for tensor in (gamma, scale, inputs.ADT))  # (B, C, H, T)
    high, low = _sums(ADT)
    entering = torch.exp(high + low)
    leaving = torch.exp((high[..., -1:] - high) + (low[..., -1:] - low)) * scale
    q, k, x = in_rows(q), in_rows(k), in_rows(x)
    added = (x * _each_row(leaving, rank)[..., None]).mT @ k
    entered = []
    for index in range(added.shape[1]):
        entered.append(state)
        state = entering[:, index, :, -1, None, None] * state + added[:, index]
    weights = _weights(high, low, scale, gamma)
    weights = weights.repeat_interleave(rank, dim=-1).repeat_interleave(rank, dim=-2)
    y = ((q @ k.mT) * weights) @ x + _each_row(entering, rank)[..., None] * (q @ torch.stack(entered, 1).mT)
    if inputs.D is not None:
        y = y + inputs.D[:, None, None] * x
    y = y.unflatten(3, (steps, rank)).permute(0, 1, 3, 4, 2, 5).flatten(1, 2)[:, :seqlen]
    return finish(y, inputs, options), States(finals[0], state, *finals[1:])


def running_angles(steps, start):
    """The angles (B, L, H, S) in [0, 2 pi), from what each step adds and those (B, H, S) before the first."""
    seqlen = steps.shape[1]
    padded = F.pad(steps, [0, 0, 0, 0, 0, -seqlen % _ROWS]).unflatten(1, (-1, _ROWS))
    return _angles(padded, start).flatten(1, 2)[:, :seqlen]


def _angles(steps, start):
    """The angles (B, C, T, H, S) in [0, 2 pi), from what each step adds and those before the first.

    Counted in turns, summed in float64, of which only the part of a turn is kept.
    """
    turn = 2 * steps.new_full((), math.pi).double()  # what a step was multiplied by: pi as its dtype rounds it
    within = torch.cumsum(steps.double() / turn, dim=2)
    totals = within[:, :, -1]
    before = torch.cumsum(totals, dim=1) - totals + start[:, None].double() / (2 * math.pi)
    turns = within + torch.remainder(before, 1)[:, :, None]
    return 2 * math.pi * torch.remainder(turns, 1).to(steps.dtype)


def _sums(ADT):
    """The running sum over a chunk as a float and what it lacks: differences between near steps stay exact."""
    total = torch.cumsum(ADT.double(), dim=-1)
    high = total.to(ADT.dtype)
    return high, (total - high).detach().to(ADT.dtype)


def _weights(high, low, scale, gamma):
    """(B, C, H, T, T): what of a step's input is in a later one's output."""
    exponent = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    later = torch.ones(exponent.shape[-2:], dtype=torch.bool, device=exponent.device).tril(-1)
    return torch.exp(exponent.masked_fill(~later, -math.inf)) * scale[..., None, :] + torch.diag_embed(gamma)


def _each_row(values, rank):
    """(B, C, H, T) as (B, C, H, T R)."""
    return values.repeat_interleave(rank, dim=-1)
