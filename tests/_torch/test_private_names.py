"""A torch without one of the private names that mamba_ssm._torch looks up: operators compute and differentiate."""

import ast
from pathlib import Path

import pytest
import torch
from _helpers import missing_name, programs

import mamba_ssm
from mamba_ssm._torch import private

# `_C._FunctionBase` is a built-in class, from which nothing can be taken away.
NAMES = [name for name in private.LOOKED_UP if name != "_C._FunctionBase.apply"]


@pytest.mark.parametrize("name", NAMES)
def test_without(name):
    if private._find(name) is None:
        pytest.skip("this torch has no such name")
    torch.multiprocessing.start_processes(missing_name.check, (name,), start_method=programs.start_method())


def private_uses(path):
    """Underscored names of torch that a file imports, or reads as an attribute: `torch._C`, `nn.Module._parameters`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if name.split(".")[0] == "torch":
                    yield from (part for part in name.split(".") if part.startswith("_"))
                    modules.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                yield ast.unparse(node)


PACKAGE = Path(mamba_ssm.__file__).parent


@pytest.mark.parametrize("file", sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")))
def test_private_names_are_used_in_one_file(file):
    found = set(private_uses(PACKAGE / file))
    assert bool(found) == (file == "_torch/private.py"), f"{file} uses {found}"
