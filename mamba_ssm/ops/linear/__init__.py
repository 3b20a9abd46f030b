"""A linear layer of few rows, as decoding has: it takes as long as reading the weight does."""

from mamba_ssm.ops.linear.linear import linear, project

__all__ = ["linear", "project"]
