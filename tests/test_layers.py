"""Imports within mamba_ssm: a layer takes only what is below it, an underscored name stays in its folder.

The layers are those of docs/architecture.md.
"""

import ast
from pathlib import Path

import pytest

import mamba_ssm

PACKAGE = Path(mamba_ssm.__file__).parent
# From the lowest: each imports from its own layer and those before it.
LAYERS = [
    {"version", "_arguments", "_lazy", "_upstream"},
    {"_torch"},
    {"_native"},
    {"_checks"},
    {"ops"},
    {"distributed"},
    {"modules", "utils"},
    {"models"},
]
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
# The package itself and the doctor hand on, and examine, everything.
ON_TOP = {"__init__.py", "__main__.py", "_doctor.py", "_neighbours.py"}


def imports(file):
    """(module, name) of each `from mamba_ssm... import name`, also inside functions."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "mamba_ssm")
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "mamba_ssm":
            yield from ((node.module, alias.name) for alias in node.names)


def layer(first):
    (found,) = (number for number, names in enumerate(LAYERS) if first in names)
    return found


@pytest.mark.parametrize("file", [file for file in FILES if file not in ON_TOP])
def test_layers_import_what_is_below_them(file):
    own = layer(file.split("/")[0].removesuffix(".py"))
    for module, name in imports(file):
        first = [*module.split("."), name][1]
        assert layer(first) <= own, f"{file} imports {module}.{name}"


@pytest.mark.parametrize("file", FILES)
def test_underscored_names_stay_in_their_folder(file):
    folder = ["mamba_ssm", *file.split("/")[:-1]]
    for module, name in imports(file):
        path = [*module.split("."), name]
        for depth, part in enumerate(path):
            if part.startswith("_") and not part.startswith("__"):
                assert folder[:depth] == path[:depth], f"{file} imports {'.'.join(path)}"
