"""Upstream's import path. There these are approximations inside triton kernels; here they are torch's functions."""

import torch

__all__ = ["cos_approx", "sech2_approx", "sigmoid_approx", "silu", "sin_approx", "tanh_approx"]


def cos_approx(x: torch.Tensor) -> torch.Tensor:
    """torch.cos."""
    return torch.cos(x)


def sin_approx(x: torch.Tensor) -> torch.Tensor:
    """torch.sin."""
    return torch.sin(x)


def tanh_approx(x: torch.Tensor) -> torch.Tensor:
    """torch.tanh."""
    return torch.tanh(x)


def sech2_approx(x: torch.Tensor) -> torch.Tensor:
    """The derivative of tanh, 1 - tanh(x)^2."""
    return 1 - torch.tanh(x).square()


def sigmoid_approx(x: torch.Tensor) -> torch.Tensor:
    """torch.sigmoid."""
    return torch.sigmoid(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times its sigmoid."""
    return torch.nn.functional.silu(x)
