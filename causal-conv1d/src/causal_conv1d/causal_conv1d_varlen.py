"""The convolution's states of packed sequences."""

from mamba_ssm._upstream import kernels
from mamba_ssm.ops.causal_conv1d import causal_conv1d_varlen_states, causal_conv1d_varlen_states_ref

__all__ = ["causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref"]

__getattr__ = kernels(__name__, {"_causal_conv1d_varlen_states": "causal_conv1d_varlen_states"})
