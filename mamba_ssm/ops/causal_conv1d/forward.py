"""Causal depthwise convolution in the functions of the causal-conv1d package, built in.

out_{d,l} = silu?(bias_d + sum_w weight_{d,w} x_{d, l-(W-1)+w}), with reverse x_{d, l+(W-1)-w}.
Letters: B batch, D channels, L length, W width 2..4.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import (
    call,
    call_below_autograd,
    call_in_backward,
    define,
    make,
    no_gradients,
    reference,
    signature,
    unpack,
)
from mamba_ssm.ops.causal_conv1d.arguments import (
    NAME,
    Inputs,
    Options,
    Results,
    check,
    fill,
    kernel_layout,
    unit_stride,
    wants_silu,
)
from mamba_ssm.ops.causal_conv1d.backward import causal_conv1d_backward_op
from mamba_ssm.ops.causal_conv1d.reference import causal_conv1d_ref


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    return_final_states: bool


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution along the last dimension, differentiable.

    Args:
        x: (B, D, L) float32, float16 or bfloat16; either the length or the channels contiguous in memory.
        weight: (D, W), W 2..4, and bias: (D); of any of these dtypes.
        seq_idx: (B, L) int32; taps that lie in another sequence count as zero. Where it is negative, x is padding: out
            and the gradient of x are zero there, whatever x holds. Not with final states.
        initial_states: (B, D, W-1) of x's dtype, the inputs before the first; zero if None. With seq_idx the row's
            first sequence alone sees them, and nothing does if the row begins with padding.
        return_final_states: also return the last W-1 inputs, (B, D, W-1) of x's dtype.
        final_states_out: (B, D, W-1) of x's dtype, to write them into.
        activation: None, "silu" or "swish".
        reverse: run backwards in time, so that a step sees itself and the W-1 that follow. The initial states are then
            the inputs after the last step, the final states the first W-1 inputs, both in the order of time. With
            seq_idx the initial states are of the last step's sequence.

    Returns:
        out (B, D, L) of x's dtype and memory layout; with return_final_states (out, final_states).

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, device, width, activation or combination is wrong.

    Same as causal_conv1d.causal_conv1d_fn of the causal-conv1d package; states work in both memory layouts, and reverse
    is an addition.
    """
    silu = wants_silu(NAME, activation)
    if reference.on and not reference.exporting:
        states = initial_states, return_final_states, final_states_out
        return causal_conv1d_ref(x, weight, bias, seq_idx, *states, activation, reverse=reverse)
    want_states = bool(return_final_states) or final_states_out is not None
    options = want_states, silu, bool(reverse)
    out, final_states = call(causal_conv1d_op, x, weight, bias, seq_idx, initial_states, *options)
    if final_states_out is not None:
        checks.check_tensor(NAME, "final_states_out", final_states_out)
        if final_states_out.requires_grad and final_states_out.is_leaf and torch.is_grad_enabled():
            raise RuntimeError(f"{NAME}: final_states_out is written in place and must not require a gradient")
        checks.check_same(NAME, "final_states_out", final_states_out, final_states.shape, x, "x", "(B, D, W-1)")
        checks.check_writable(NAME, "final_states_out", final_states_out)
        final_states = final_states_out.copy_(final_states)
    return (out, final_states) if return_final_states else out


# ---- operator --------------------------------------------------------------------------------------------------------


def _check(inputs, return_final_states):
    sizes = check(inputs)
    if return_final_states and inputs.seq_idx is not None:
        raise ValueError(f"{NAME}: seq_idx and final states cannot be asked for together")
    return sizes


def _allocate(sizes, x, return_final_states):
    """The operator's outputs, without values. x: in kernel layout."""
    return unit_stride(torch.empty_like(x)), x.new_empty(sizes.states) if return_final_states else None


def _forward(*arguments):
    inputs, wanted, options = unpack(arguments, Inputs, Wanted, Options)
    sizes, inputs = _check(inputs, wanted.return_final_states), kernel_layout(inputs, options.reverse)
    results = out, final_states = _allocate(sizes, inputs.x, wanted.return_final_states)
    if out.numel():
        launch_forward(sizes, inputs, options, out, final_states)
    elif final_states is not None:
        final_states.zero_() if inputs.initial_states is None else final_states.copy_(inputs.initial_states)
    return results


def _forward_fake(*arguments):
    inputs, wanted, _ = unpack(arguments, Inputs, Wanted, Options)
    return _allocate(_check(inputs, wanted.return_final_states), unit_stride(inputs.x), wanted.return_final_states)


def launch_forward(sizes, inputs, options, out, final_states):
    """Runs the kernels. inputs: in kernel layout. x, out: tensors or Views (B, D, L), as unit_stride has x."""
    params = abi.MambaCausalConv1d()
    functions = place(params, inputs.weight)
    fill(params, sizes, options, inputs, make(Results, (out, final_states)))
    run(functions, "causal_conv1d_forward", params)


class _CausalConv1d(torch.autograd.Function):
    """Saves the inputs; what silu needs is computed again in backward."""

    @staticmethod
    def forward(ctx, *arguments):
        inputs, _, ctx.options = unpack(arguments, Inputs, Wanted, Options)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return call_below_autograd(causal_conv1d_op, *arguments)

    @staticmethod
    def backward(ctx, dout, dfinal_states):
        if dout is None and dfinal_states is None:
            return no_gradients(Inputs, Wanted, Options)
        x, *others, initial_states = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(x)
        arguments = dout, dfinal_states, x, *others, initial_states, initial_states is not None, *ctx.options
        dx, dweight, dbias, dinitial_states = call_in_backward(causal_conv1d_backward_op, *arguments)
        return *Inputs(dx, dweight, dbias, None, dinitial_states), *no_gradients(Wanted, Options)


causal_conv1d_op = define(
    f"causal_conv1d({signature(Inputs, Wanted, Options)}) -> (Tensor out, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_CausalConv1d,
    planned=(),
)
