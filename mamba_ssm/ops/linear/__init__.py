"""A linear layer of few rows, as decoding has: it takes as long as reading the weight does. And weights of int8."""

from mamba_ssm.ops.linear.dequantize import dequantize
from mamba_ssm.ops.linear.greedy import NextStep, greedy_step, greedy_step_ref, greedy_token
from mamba_ssm.ops.linear.linear import linear, project
from mamba_ssm.ops.linear.normed import normed_linear, takes_norm
from mamba_ssm.ops.linear.quantized import quantize_weight, quantized_linear, scales_shape
from mamba_ssm.ops.linear.reference import dequantize_ref, linear_ref

__all__ = [
    "NextStep",
    "dequantize",
    "dequantize_ref",
    "greedy_step",
    "greedy_step_ref",
    "greedy_token",
    "linear",
    "linear_ref",
    "normed_linear",
    "project",
    "quantize_weight",
    "quantized_linear",
    "scales_shape",
    "takes_norm",
]
