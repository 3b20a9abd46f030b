"""The functions of a kernel library, bound by ctypes as abi.py declares them."""

import ctypes
import typing
from collections.abc import Callable

from mamba_ssm._native import abi

# A library's functions: {name without mamba_: ctypes function}.
Functions = dict[str, Callable[..., typing.Any]]


def bind(library: ctypes.CDLL) -> Functions:
    """Declares every function of an opened ctypes library; returns them by name.

    Raises AttributeError if the library lacks one.
    """
    bound: Functions = {}
    for name, (result, parameters) in abi.FUNCTIONS.items():
        function = getattr(library, "mamba_" + name)
        function.restype, function.argtypes = result, parameters
        bound[name] = function
    return bound
