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
    {"gguf"},
    {"_doctor"},
]
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
# The package itself hands on everything, and its command calls the doctor.
ON_TOP = {"__init__.py", "__main__.py"}


# Files that import a module by a name that they compute: submodules of a package, and packages that are not this one.
COMPUTED = {"_lazy.py", "utils/hf.py"}


def imports(source, file):
    """(module, name or "") of each import of mamba_ssm in the source of a file, also inside functions."""
    package = ["mamba_ssm", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*within, *filter(None, [node.module])])
            found = [(module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name, *more = (one.value if isinstance(one, ast.Constant) else None for one in node.args)
            assert (name and not more) or file in COMPUTED, f"{file} imports {ast.unparse(node)}: write it as an import"
            found = [(name, "")] if name else []
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] == "mamba_ssm")


def imports_of(file):
    return imports((PACKAGE / file).read_text(encoding="utf-8"), file)


@pytest.mark.parametrize(
    "line",
    [
        "import mamba_ssm.models.config_mamba",
        "from mamba_ssm.models import config_mamba",
        "from mamba_ssm import models",
        "from ...models import config_mamba",
        "from ... import models",
        "def f():\n    from ...models.config_mamba import MambaConfig",
        "import importlib\nimportlib.import_module('mamba_ssm.models')",
        "__import__('mamba_ssm.models')",
    ],
)
def test_an_import_of_a_higher_layer_is_found(line):
    with pytest.raises(AssertionError, match="imports mamba_ssm"):
        check_layers("ops/norm/planted.py", imports(line, "ops/norm/planted.py"))


@pytest.mark.parametrize("call", ["__import__('mamba_' + 'ssm')", "import_module(name)", "import_module('.x', 'y')"])
def test_an_import_by_a_computed_name_is_refused(call):
    with pytest.raises(AssertionError, match="write it as an import"):
        list(imports(call, "ops/norm/planted.py"))


def layer(first):
    (found,) = (number for number, names in enumerate(LAYERS) if first in names)
    return found


@pytest.mark.parametrize("file", [file for file in FILES if file not in ON_TOP])
def test_layers_import_what_is_below_them(file):
    check_layers(file, imports_of(file))


def check_layers(file, found):
    own = layer(file.split("/")[0].removesuffix(".py"))
    for module, name in found:
        first = [*module.split("."), name][1]
        assert layer(first) <= own, f"{file} imports {module}.{name}"


@pytest.mark.parametrize("file", FILES)
def test_underscored_names_stay_in_their_folder(file):
    folder = ["mamba_ssm", *file.split("/")[:-1]]
    for module, name in imports_of(file):
        path = [*module.split("."), name]
        for depth, part in enumerate(path):
            if part.startswith("_") and not part.startswith("__"):
                assert folder[:depth] == path[:depth], f"{file} imports {'.'.join(path)}"
