"""Numbers of rows in a cache of states, as the kernels take them."""

import torch

_LARGEST = torch.iinfo(torch.int32).max


def cache_rows(op, name, indices, rows):
    """indices (B) as contiguous int32. rows: how many the cache has.

    An int64 that int32 cannot hold becomes the nearest that it can, which means the same: padding, or beyond the cache.
    On the CPU a row beyond the cache, or named twice, is an error. On a GPU looking at the values would synchronise:
    there the kernels answer a row beyond with NaN, and entries that share a row race for it.
    """
    if indices.is_cpu:
        seen = set()
        for row in indices.tolist():
            if row >= rows:
                raise ValueError(f"{op}: {name} must be less than the number of rows of the state, {rows}, got {row}")
            if row in seen:
                raise ValueError(f"{op}: {name} must not name a row twice, got {row} more than once")
            if row >= 0:
                seen.add(row)
    if indices.dtype == torch.int64:
        indices = indices.clamp(-1, _LARGEST).to(torch.int32)
    return indices.contiguous()
