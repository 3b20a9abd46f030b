"""Generation and checkpoints in upstream's names."""

import typing

from mamba_ssm._lazy import submodules

if not typing.TYPE_CHECKING:
    __getattr__ = submodules(__name__)
