"""Upstream's import paths of its TileLang kernels: aliases of operators of ours. No compiler is imported."""

import typing

from mamba_ssm._lazy import submodules

if not typing.TYPE_CHECKING:
    __getattr__ = submodules(__name__)
