"""Causal depthwise convolution in the functions of the causal-conv1d package, built in."""

from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_fn, causal_conv1d_varlen_states
from mamba_ssm.ops.causal_conv1d.reference import (
    causal_conv1d_ref,
    causal_conv1d_update_ref,
    causal_conv1d_varlen_states_ref,
)
from mamba_ssm.ops.causal_conv1d.update import causal_conv1d_update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
    "causal_conv1d_varlen_states",
    "causal_conv1d_varlen_states_ref",
]
