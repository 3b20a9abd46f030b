"""The switch from kernels to plain torch."""

from mamba_ssm._torch.reference import plain_torch

__all__ = ["plain_torch"]
