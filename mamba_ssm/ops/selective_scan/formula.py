"""The selective scan in torch operators over all steps at once, and the derivatives that its operators have by it.

For forward mode, torch.func and third derivatives the states take B L D N elements; a double backward, in closed form,
takes little memory.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._torch import call, derivatives
from mamba_ssm.ops._shared.recurrence import Recurrence
from mamba_ssm.ops._shared.reference import convert, working_dtype
from mamba_ssm.ops.selective_scan.arguments import NAME, Inputs
from mamba_ssm.ops.selective_scan.backward import of_inputs, selective_scan_backward_op
from mamba_ssm.ops.selective_scan.forward import selective_scan_op
from mamba_ssm.ops.selective_scan.second_backward import Core, change_of_gradients, goes_on

_TENSORS = len(Inputs._fields)


def scan_formula(*arguments):
    """The operator's results, without checkpoints."""
    return _around(_core, *arguments)


def _around(core, *arguments):
    """The operator's results from its core's."""
    inputs, (softplus, want_last_state, _, reverse) = Inputs(*arguments[:_TENSORS]), arguments[_TENSORS:]
    dtype = working_dtype(inputs.u)
    u, delta, A, B, C, D, z, delta_bias, initial_state = (convert(tensor, dtype) for tensor in inputs[:-1])
    dt = delta if delta_bias is None else delta + delta_bias[:, None]
    if softplus:
        dt = F.softplus(dt)
    B, C = _variable(B, u), _variable(C, u)
    groups = max(B.shape[1], C.shape[1])
    B, C = (matrix.repeat_interleave(groups // matrix.shape[1], dim=1) for matrix in (B, C))
    out, last_state = core(Core(u, dt, A, B, C, initial_state), inputs.seq_idx, reverse)
    if D is not None:
        out = out + D[:, None] * u
    if z is not None:
        out = out * F.silu(z)
    return out.to(inputs.u.dtype), last_state if want_last_state else None, None


def _variable(matrix, u):
    """B or C in any of its forms as (B, G, N, L)."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None].expand(u.shape[0], -1, -1, u.shape[2])
    return matrix.unsqueeze(1) if matrix.dim() == 3 else matrix


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


def _around_operator(*arguments):
    """scan_formula with the operator itself as its core."""

    def core(given, seq_idx, reverse):
        inputs = Inputs(*given[:5], None, None, None, given.initial_state, seq_idx)
        return call(selective_scan_op, *inputs, False, True, False, reverse)[:2]

    return _around(core, *arguments)


def _gradients_of(formula):
    """The backward operator's formula."""

    def gradients(dout, dlast_state, *arguments):
        *tensors, _, softplus, need_dinitial_state, _, reverse = arguments
        options = softplus, dlast_state is not None, False, reverse
        run = derivatives.vjp(lambda *given: formula(*given, *options)[:2], tensors, (dout, dlast_state))
        *grads, dinitial_state, _ = run
        return *grads, dinitial_state if need_dinitial_state else None, None

    return gradients


def _second(arguments, needed, cotangents):
    """Gradients of the backward operator's arguments from those of its results."""
    derivatives.refuse_vectorized(NAME)
    dout, dlast_state, *given = arguments
    inputs, softplus, reverse = Inputs(*given[:_TENSORS]), given[_TENSORS + 1], given[-1]
    if torch.is_grad_enabled():  # and so on, to any order
        return derivatives.through(_gradients_of(scan_formula), arguments, needed, cotangents)
    matrices_vary = inputs.B.dim() == inputs.C.dim() == 4 and inputs.B.shape[1] == inputs.C.shape[1]
    beside = softplus, inputs.D, inputs.z, inputs.delta_bias
    if beside != (False, None, None, None) or not matrices_vary or inputs.u.dtype != torch.float32:
        return derivatives.through(_gradients_of(_around_operator), arguments, needed, cotangents)
    core = Core(*inputs[:5], inputs.initial_state)
    of_results = of_inputs(cotangents)
    direction = Core(*of_results[:5], of_results.initial_state)
    out, last_state, grads = change_of_gradients(core, direction, dout, dlast_state, inputs.seq_idx, reverse)
    back = Inputs(*grads[:5], None, None, None, grads.initial_state, None)
    found = out, last_state, *back, *[None] * (len(arguments) - 2 - _TENSORS)
    return [grad if need else None for grad, need in zip(found, needed, strict=True)]


derivatives.extend(selective_scan_op, scan_formula)
derivatives.extend_backward(selective_scan_backward_op, second=_second)
