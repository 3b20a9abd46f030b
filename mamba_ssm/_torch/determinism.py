"""Whether gradients have to be the same bits in every run: where the kernels add with atomics they then do not."""

import os

import torch

_VARIABLE = "MAMBA_DETERMINISTIC"
_KEY = os.environ.encodekey(_VARIABLE) if hasattr(os.environ, "_data") else None  # as os.environ stores it
_override: bool | None = None


def use_deterministic_mode() -> bool:
    """What set_deterministic_mode has said, else the variable MAMBA_DETERMINISTIC (1 or 0), else torch."""
    if _override is not None:
        return _override
    # os.environ raises and catches an error where there is no such variable, 4 us of each backward: so CPython's own
    # dict is asked first, if this Python has it
    variables = getattr(os.environ, "_data", None)
    may_be_set = variables is None or _KEY is None or _KEY in variables
    variable = os.environ.get(_VARIABLE) if may_be_set else None
    return variable.startswith("1") if variable else torch.are_deterministic_algorithms_enabled()


def set_deterministic_mode(value: bool | None) -> None:
    """True or False for this package alone; None: as torch.use_deterministic_algorithms says."""
    global _override
    _override = value
