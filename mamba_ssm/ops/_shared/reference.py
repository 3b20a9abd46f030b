"""The dtype that the plain torch references compute in: float32, or float64 where the inputs are float64."""

import torch

from mamba_ssm import _checks as checks


def working_dtype(tensor):
    checks.no_complex("plain_torch", "an activation", tensor)
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def convert(tensor, dtype):
    return None if tensor is None else tensor.to(dtype)
