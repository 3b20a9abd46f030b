"""The CUDA library's functions where a test only asks what it holds, which needs no GPU."""

import ctypes
import functools
import os

import pytest

from mamba_ssm._native import abi, loader, signatures

EMULATED = os.environ.get("MAMBA_EMULATED_CUDA")


@functools.cache
def emulated_functions():
    return signatures.bind(ctypes.CDLL(EMULATED))


@functools.cache
def emulates_float16():
    """AddressSanitizer's build has none, to be compiled sooner."""
    facts = abi.MambaLibraryInfo()
    assert emulated_functions()["library_info"](facts) == 0
    return bool(facts.supports_float16)


def functions_or_skip():
    """Those of the emulated library where that is named, else the installed one's."""
    if EMULATED is not None:
        return emulated_functions()
    if not loader.library_path("cuda").exists():
        pytest.skip("this installation has no CUDA library")
    return loader.load("cuda")
