"""The derivatives of the causal convolution beyond the kernels' first ones: by its taps in plain torch."""

from mamba_ssm._torch import derivatives
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


derivatives.extend(causal_conv1d_op, _formula)
derivatives.extend_backward(causal_conv1d_backward_op, _gradients)
