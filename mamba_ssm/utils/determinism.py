"""Upstream's import path for the choice of repeatable gradients. What else it has there tunes triton kernels."""

import typing

from mamba_ssm._torch import set_deterministic_mode, use_deterministic_mode
from mamba_ssm._upstream import kernels

__all__ = ["set_deterministic_mode", "use_deterministic_mode"]

if not typing.TYPE_CHECKING:
    _NAMES = ("autotune_configs", "alloc_tile_workspace", "finalize_tile_workspace")
    __getattr__ = kernels(__name__, dict.fromkeys(_NAMES, "set_deterministic_mode"))
