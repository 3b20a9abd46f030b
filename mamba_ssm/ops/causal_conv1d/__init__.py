"""Causal depthwise convolution in the functions of the causal-conv1d package, built in."""

from mamba_ssm.ops.causal_conv1d import formula as _formula  # noqa: F401  (further derivatives)
from mamba_ssm.ops.causal_conv1d.arguments import wants_silu
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_fn
from mamba_ssm.ops.causal_conv1d.reference import (
    causal_conv1d_ref,
    causal_conv1d_update_ref,
    causal_conv1d_varlen_states_ref,
)
from mamba_ssm.ops.causal_conv1d.step import causal_conv1d_step
from mamba_ssm.ops.causal_conv1d.update import causal_conv1d_update
from mamba_ssm.ops.causal_conv1d.varlen import causal_conv1d_varlen_states

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_ref",
    "causal_conv1d_step",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
    "causal_conv1d_varlen_states",
    "causal_conv1d_varlen_states_ref",
    "wants_silu",
]
