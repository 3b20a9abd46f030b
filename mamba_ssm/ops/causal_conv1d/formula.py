"""The derivatives of the causal convolution beyond the kernels' first ones: a double backward by its own operators, the
others by its taps in plain torch.
"""

import torch

from mamba_ssm._torch import call, derivatives
from mamba_ssm._torch.autocast import no_autocast
from mamba_ssm.ops._shared.gradients import silu_derivatives
from mamba_ssm.ops._shared.reference import convert
from mamba_ssm.ops.causal_conv1d.arguments import Inputs
from mamba_ssm.ops.causal_conv1d.backward import causal_conv1d_backward_op
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_op
from mamba_ssm.ops.causal_conv1d.reference import causal_conv1d_ref


def _formula(x, weight, bias, seq_idx, initial_states, want_states, silu, reverse):
    """The operator's results."""
    options = {"activation": "silu" if silu else None, "reverse": reverse}
    out, final_states = causal_conv1d_ref(x, weight, bias, seq_idx, initial_states, True, **options)
    return out, final_states if want_states else None


def _gradients(dout, dfinal_states, *arguments):
    """The backward operator's results."""
    *inputs, need_dinitial_states, silu, reverse = arguments
    options = dfinal_states is not None, silu, reverse
    dx, dweight, dbias, _, dinitial_states = derivatives.vjp(
        lambda *given: _formula(*given, *options), inputs, (dout, dfinal_states)
    )
    return dx, dweight, dbias, dinitial_states if need_dinitial_states else None


def _second(arguments, needed, cotangents):
    """Gradients of the backward operator's arguments from those of its results."""
    dout, dfinal_states, *given = arguments
    if torch.is_grad_enabled() or derivatives.is_vectorized():
        return derivatives.through(_gradients, arguments, needed, cotangents)
    inputs, (_, silu, reverse) = Inputs(*given[:5]), given[5:]
    with no_autocast(dout):
        out, final_states, grads = _tangents(inputs, cotangents, dout, dfinal_states is not None, silu, reverse)
    found = out, final_states, *grads, None, None, None
    return [grad.to(given.dtype) if need else None for grad, given, need in zip(found, arguments, needed, strict=True)]


def _tangents(inputs, directions, dout, want_states, silu, reverse):
    """Tangents of out, of the final states and of the gradients of inputs, where these move by directions, in which
    None is zero. The Hessian is symmetric, so they are gradients of backward's arguments.

    Without silu the convolution is linear in x and the states, and in weight: a tangent is the sum of two convolutions.
    """
    x, weight, bias, states = tensors = [
        convert(tensor, torch.float32) for tensor in (*inputs[:3], inputs.initial_states)
    ]
    dx, dweight, dbias, dstates = (
        torch.zeros_like(of) if to is None and of is not None else convert(to, torch.float32)
        for to, of in zip(directions, tensors, strict=True)
    )
    dout, seq_idx = dout.float(), inputs.seq_idx
    moved, final_states = call(causal_conv1d_op, dx, weight, dbias, seq_idx, dstates, want_states, False, reverse)
    moved = moved + call(causal_conv1d_op, x, dweight, None, seq_idx, states, False, False, reverse)[0]
    need_states = states is not None
    if silu:
        before = call(causal_conv1d_op, x, weight, bias, seq_idx, states, False, False, reverse)[0]
        _, slope, curve = silu_derivatives(before)
        dout_tangent, dout = curve.mul_(moved).mul_(dout), slope * dout
        moved = moved * slope
    options = need_states, False, reverse
    grads = call(causal_conv1d_backward_op, dout, None, dx, dweight, None, seq_idx, dstates, *options)
    of_x, of_weight, of_bias, of_states = grads[0], grads[1], None if bias is None else torch.zeros_like(bias), grads[3]
    if silu:
        more = call(causal_conv1d_backward_op, dout_tangent, None, x, weight, bias, seq_idx, states, *options)
        of_x, of_weight, of_bias = of_x + more[0], of_weight + more[1], more[2]
        of_states = of_states + more[3] if need_states else None
    return moved, final_states, (of_x, of_weight, of_bias, None, of_states)


derivatives.extend(causal_conv1d_op, _formula)
derivatives.extend_backward(causal_conv1d_backward_op, second=_second)
