"""Memory for gradients."""

import torch


def empty_like(tensor, dtype=None):
    """A new contiguous tensor of the same shape: half the time of new_empty."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def silu_derivatives(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """silu(z), its first and its second derivative."""
    s = torch.sigmoid(z)
    silu, rest = z * s, 1 - s
    return silu, torch.addcmul(s, silu, rest), (z * (1 - 2 * s)).add_(2).mul_(s).mul_(rest)
