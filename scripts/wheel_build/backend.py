"""PEP 517 backend: setuptools' own, plus nvcc from PyPI (MAMBA_SSM_CUDA=on) and the tools of MAMBA_RELEASE; and no
CPU-only wheel that nobody asked for, since pip hides the warning. An editable install is for this machine and may be
CPU-only. The wheel is mamba_ssm's; that of causal-conv1d, which setup.py makes too, has a backend of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from . import commands
from .plan import load, more_requirements, present

ROOT = Path(__file__).resolve().parents[2]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *more_requirements(os.environ)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *more_requirements(os.environ)]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    plan = load(ROOT).unseen()
    if plan.fatal:
        present(plan)
    commands.both_wheels = False
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None) -> str:
    commands.in_place = True
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    commands.in_place = True
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
