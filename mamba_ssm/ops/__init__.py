"""Operators: one module each, on the native kernels, registered with torch.library."""

import typing

from mamba_ssm._lazy import submodules

if not typing.TYPE_CHECKING:
    __getattr__ = submodules(__name__)
