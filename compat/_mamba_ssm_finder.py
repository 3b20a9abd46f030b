"""Lets the modules beside this one find mamba_ssm's operators, whichever mamba_ssm Python has imported.

Many projects bring a copy of an older mamba_ssm with them. It lies before this one on the path, or was copied over it,
and calls selective_scan_cuda and causal_conv1d_cuda. What these are made of is found here where the copy lacks it, and
nothing else of this mamba_ssm is mixed into it.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
# Beside this file where a wheel was installed, beside this folder in a checkout.
_FOLDER = next(folder / "mamba_ssm" for folder in (_HERE, _HERE.parent) if (folder / "mamba_ssm").is_dir())
# They and this package's private modules import each other, and nothing else of it.
_OPERATORS = ("mamba_ssm.ops._shared", "mamba_ssm.ops.causal_conv1d", "mamba_ssm.ops.selective_scan")


class _Finder:
    """Asked last, for what no folder of the package that was imported has."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("mamba_ssm._") and name not in _OPERATORS:
            return None
        return PathFinder.find_spec(name, [str(_FOLDER.joinpath(*name.split(".")[1:-1]))])


# once, also where the modules were deleted from sys.modules and are imported again
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", None) != __name__]
sys.meta_path.append(_Finder)
