"""A linear layer of few rows, as decoding has: it takes as long as reading the weight does."""

from mamba_ssm.ops.linear.linear import linear, project
from mamba_ssm.ops.linear.reference import dequantize, linear_ref

__all__ = ["dequantize", "linear", "linear_ref", "project"]
