"""The causal convolution in the names of the causal-conv1d package, on mamba_ssm's kernels for CUDA and CPU tensors."""

import importlib
import typing

try:
    import _mamba_ssm_finder  # noqa: F401  (before mamba_ssm, which may be another project's copy)
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "this causal_conv1d calls mamba_ssm, which is not installed here: install the one that it came with, or do: "
        "pip uninstall causal-conv1d",
        name="mamba_ssm",
    ) from error

# Whose functions these are. The distribution's version goes on with +mamba and mamba_ssm's.
__version__ = "1.7.0"
__all__ = ["__version__", "causal_conv1d_fn", "causal_conv1d_update"]

if not typing.TYPE_CHECKING:

    def __getattr__(name):
        """For a copy of mamba_ssm that imports from here while the next line imports it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("causal_conv1d.causal_conv1d_interface"), name)


import mamba_ssm  # noqa: F401
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update
