"""PEP 517 backend: setuptools' own, plus NVIDIA's nvcc wheels where MAMBA_SSM_CUDA=on finds no nvcc."""

from __future__ import annotations

import os

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from .plan import nvcc_requirements


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *nvcc_requirements(os.environ)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *nvcc_requirements(os.environ)]
