"""PEP 517 backend: setuptools' own, plus nvcc from PyPI (MAMBA_SSM_CUDA=on) and the tools of MAMBA_RELEASE."""

from __future__ import annotations

import os

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from .plan import more_requirements


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *more_requirements(os.environ)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *more_requirements(os.environ)]
