"""Numbers of rows in a cache of states, as the kernels take them."""

import torch

from mamba_ssm._torch import look_at_values

_LARGEST = torch.iinfo(torch.int32).max


def cache_rows(op, name, indices, rows, only_read=False):
    """indices (B) as contiguous int32. rows: how many the cache has. only_read: a row may be named twice.

    An int64 that int32 cannot hold becomes the nearest that it can, which means the same: padding, or beyond the cache.
    On the CPU a row beyond the cache, or named twice, is an error. On a GPU looking at the values would synchronise:
    there the kernels answer a row beyond with NaN, and entries that share a row race for it.
    """
    if indices.is_cpu:
        look_at_values()
        seen = set()
        for row in indices.tolist():
            if row >= rows:
                raise ValueError(f"{op}: {name} must be less than the number of rows of the state, {rows}, got {row}")
            if row in seen and not only_read:
                raise ValueError(f"{op}: {name} must not name a row twice, got {row} more than once")
            if row >= 0:
                seen.add(row)
    if indices.dtype == torch.int64:
        indices = indices.clamp(-1, _LARGEST).to(torch.int32)
    return indices.contiguous()


def check_rows_of_others(op, name, destinations, sources):
    """On the CPU: no entry writes a row that another one reads, or it would matter which of them comes first. sources
    None: each reads the row of its own number.
    """
    if not destinations.is_cpu:
        return
    read = range(len(destinations)) if sources is None else sources.tolist()
    readers = {}
    for entry, row in enumerate(read):
        readers.setdefault(row, set()).add(entry)
    for entry, row in enumerate(destinations.tolist()):
        if row >= 0 and read[entry] >= 0 and readers.get(row, set()) - {entry}:
            raise ValueError(f"{op}: {name} must not name a row that another entry reads, got {row} for entry {entry}")
