"""Whether gradients have to be the same bits in every run: where the kernels add with atomics they then do not."""

import os

import torch

_override: bool | None = None


def use_deterministic_mode() -> bool:
    """What set_deterministic_mode has said, else the variable MAMBA_DETERMINISTIC (1 or 0), else torch."""
    if _override is not None:
        return _override
    variable = os.environ.get("MAMBA_DETERMINISTIC")
    return variable.startswith("1") if variable else torch.are_deterministic_algorithms_enabled()


def set_deterministic_mode(value: bool | None) -> None:
    """True or False for this package alone; None: as torch.use_deterministic_algorithms says."""
    global _override
    _override = value
