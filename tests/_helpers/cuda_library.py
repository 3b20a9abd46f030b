"""The CUDA library's functions where a test only asks what it holds, which needs no GPU."""

import ctypes
import functools
import os

import pytest

from mamba_ssm._native import loader, signatures

EMULATED = os.environ.get("MAMBA_EMULATED_CUDA")


@functools.cache
def emulated_functions():
    return signatures.bind(ctypes.CDLL(EMULATED))


def functions_or_skip():
    """Those of the emulated library where that is named, else the installed one's."""
    if EMULATED is not None:
        return emulated_functions()
    if not loader.library_path("cuda").exists():
        pytest.skip("this installation has no CUDA library")
    return loader.load("cuda")
