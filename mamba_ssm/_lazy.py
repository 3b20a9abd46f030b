"""Submodules as attributes of their package, imported when first asked for, so that importing it costs no more."""

import importlib
import types
import typing


def submodules(package: str) -> typing.Callable[[str], types.ModuleType]:
    """A __getattr__ for the package of this name. For code that imports mamba_ssm alone and goes on by attributes."""

    def find(name: str) -> types.ModuleType:
        path = f"{package}.{name}"
        if not name.startswith("__"):
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
