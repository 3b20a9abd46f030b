"""Tensor and sequence parallelism on torch.distributed."""
