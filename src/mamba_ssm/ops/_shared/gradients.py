"""Gradients of parameters, which kernels write in float32 parts, one for each share of the work, and their sum."""

import torch


def empty_like(tensor, dtype=None):
    """A new contiguous tensor of the same shape: half the time of new_empty."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def empty_parts(tensor, count, single=torch.float32):
    """Memory for the parts of tensor's gradient. They come in front; a single part, of dtype `single`, is the gradient
    itself.
    """
    if count == 1:
        return empty_like(tensor, single)
    return tensor.new_empty((count, *tensor.shape), dtype=torch.float32)


def add_parts(parts, tensor):
    """The gradient of tensor from its parts."""
    if parts is None:
        return None
    if parts.dim() > tensor.dim():
        parts = parts.sum(0)
    return parts if parts.dtype == tensor.dtype else parts.to(tensor.dtype)
