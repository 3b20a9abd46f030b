"""Functions with a bend in plain torch, with the derivatives that the kernels take there.

torch.clamp's derivative at a bound is 1 up to torch 2.13 and 0 from 2.15 on, so these are written by torch.where.
"""

import torch


def clamp(x: torch.Tensor, least: float = float("-inf"), most: float = float("inf")) -> torch.Tensor:
    """x within the bounds; the derivative is 1 from least to most, both included, and 0 beyond. A NaN stays."""
    if least > float("-inf"):
        x = torch.where(x < least, least, x)
    if most < float("inf"):
        x = torch.where(x > most, most, x)
    return x


def heavy_tail_activation(x: torch.Tensor) -> torch.Tensor:
    """1 + x from 0 on, 1 / (1 - x) below: positive, with a slope of 1 at 0 and a tail that falls slowly."""
    positive = x > 0
    tail = 1 / (1 - torch.where(positive, 0.0, x))  # at most 1, so that the other branch's gradient is finite
    return torch.where(positive, 1 + x, tail)
