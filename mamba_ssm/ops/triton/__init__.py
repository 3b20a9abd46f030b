"""Upstream's import paths: thin aliases of this package's own operators. Triton is never imported."""

import typing

from mamba_ssm._lazy import submodules

if not typing.TYPE_CHECKING:
    __getattr__ = submodules(__name__)
