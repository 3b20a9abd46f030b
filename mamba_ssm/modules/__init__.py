"""Neural network modules in upstream's names and parameter layouts."""

import typing

from mamba_ssm._lazy import submodules

if not typing.TYPE_CHECKING:
    __getattr__ = submodules(__name__)
