"""The selective scan in torch operators over all steps at once, and the derivatives that its operators have by it.

For forward mode, torch.func and third derivatives the states take B L D N elements; a double backward has an
operator, which takes little memory.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm._torch import derivatives
from mamba_ssm._torch.autocast import no_autocast
from mamba_ssm.ops._shared.recurrence import Recurrence
from mamba_ssm.ops._shared.reference import convert, working_dtype
from mamba_ssm.ops.selective_scan.arguments import NAME, Inputs
from mamba_ssm.ops.selective_scan.backward import of_inputs, selective_scan_backward_op
from mamba_ssm.ops.selective_scan.double_blocks import goes_on
from mamba_ssm.ops.selective_scan.forward import selective_scan_op
from mamba_ssm.ops.selective_scan.second_backward import grouped, tangents_of_backward, variable

_TENSORS = len(Inputs._fields)


class Core(typing.NamedTuple):
    """The scan's inputs without what goes before and behind the states, all of one dtype."""

    u: torch.Tensor  # (B, D, L)
    dt: torch.Tensor  # (B, D, L); as the states use it
    A: torch.Tensor  # (D, N)
    B: torch.Tensor  # (B, G, N, L)
    C: torch.Tensor  # (B, G, N, L)
    initial_state: torch.Tensor | None  # (B, D, N)


def scan_formula(*arguments):
    """The operator's results, without checkpoints."""
    inputs, (softplus, want_last_state, _, reverse) = Inputs(*arguments[:_TENSORS]), arguments[_TENSORS:]
    dtype = working_dtype(inputs.u)
    u, delta, A, B, C, D, z, delta_bias, initial_state = (convert(tensor, dtype) for tensor in inputs[:-1])
    dt = delta if delta_bias is None else delta + delta_bias[:, None]
    if softplus:
        dt = F.softplus(dt)
    groups = max(variable(matrix, u).shape[1] for matrix in (B, C))
    B, C = (grouped(matrix, u, groups) for matrix in (B, C))
    out, last_state = _core(Core(u, dt, A, B, C, initial_state), inputs.seq_idx, reverse)
    if D is not None:
        out = out + D[:, None] * u
    if z is not None:
        out = out * F.silu(z)
    return out.to(inputs.u.dtype), last_state if want_last_state else None, None


def _core(core, seq_idx, reverse):
    """out (B, D, L) and the last state (B, D, N); the states of all steps are (L, B, G, D / G, N)."""
    groups = core.B.shape[1]
    if core.u.shape[2] == 0:
        last_state = core.initial_state
        return core.u * 0, core.u.new_zeros(*core.u.shape[:2], core.A.shape[1]) if last_state is None else last_state
    dt, u = (tensor.unflatten(1, (groups, -1)).permute(3, 0, 1, 2) for tensor in (core.dt, core.u))
    B, C = (tensor.permute(3, 0, 1, 2).unsqueeze(3) for tensor in (core.B, core.C))
    decay = torch.exp(dt[..., None] * core.A.unflatten(0, (groups, -1)))
    if seq_idx is not None:
        decay = decay * goes_on(seq_idx, reverse).t()[..., None, None, None]
    driven = (dt * u)[..., None] * B
    if core.initial_state is None:
        states = Recurrence.apply(decay[:-1] if reverse else decay[1:], driven, reverse)
    else:
        initial = core.initial_state.unflatten(1, (groups, -1))[None]
        states = Recurrence.apply(decay, torch.cat([driven, initial] if reverse else [initial, driven]), reverse)
        states = states[:-1] if reverse else states[1:]
    out = (states * C).sum(-1)
    return out.permute(1, 2, 3, 0).flatten(1, 2), states[0 if reverse else -1].flatten(1, 2)


# ---- double backward -------------------------------------------------------------------------------------------------


def _gradients(dout, dlast_state, *arguments):
    """The backward operator's formula."""
    *tensors, _, softplus, need_dinitial_state, _, reverse = arguments
    options = softplus, dlast_state is not None, False, reverse
    run = derivatives.vjp(lambda *given: scan_formula(*given, *options)[:2], tensors, (dout, dlast_state))
    *grads, dinitial_state, _ = run
    return *grads, dinitial_state if need_dinitial_state else None, None


def _second(arguments, needed, cotangents):
    """Gradients of the backward operator's arguments from those of its results."""
    derivatives.refuse_vectorized(NAME)
    dout, dlast_state, *given = arguments
    inputs, softplus, reverse = Inputs(*given[:_TENSORS]), given[_TENSORS + 1], given[-1]
    if torch.is_grad_enabled():  # and so on, to any order
        return derivatives.through(_gradients, arguments, needed, cotangents)
    with no_autocast(dout):
        found = tangents_of_backward(inputs, of_inputs(cotangents), dout, dlast_state, softplus, reverse)
    out, last_state, grads = found
    found = out, last_state, *grads, *[None] * (len(arguments) - 2 - _TENSORS)
    return [grad.to(given.dtype) if need else None for grad, given, need in zip(found, arguments, needed, strict=True)]


derivatives.extend(selective_scan_op, scan_formula)
derivatives.extend_backward(selective_scan_backward_op, second=_second)
