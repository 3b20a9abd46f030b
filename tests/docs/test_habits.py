"""Formatters have one version: that of pyproject.toml's extra `test`, CI's constraints and pre-commit's hooks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def versions(path, tool):
    """Every version that a file pins a tool to."""
    return set(re.findall(rf"\b{tool}==([\w.]+)", (ROOT / path).read_text(encoding="utf-8")))


@pytest.mark.parametrize("tool", ["ruff", "clang-format"])
def test_one_version_of_each_formatter(tool):
    (expected,) = versions("pyproject.toml", tool)
    assert versions(".ci/constraints.txt", tool) == {expected}
    assert versions(".pre-commit-config.yaml", tool) == {expected}


def test_one_version_of_the_type_checker():
    """pre-commit runs the one that is installed beside torch, pyproject.toml's."""
    assert versions(".ci/constraints.txt", "mypy") == versions("pyproject.toml", "mypy") != set()


def test_ci_types_readmes_test_command_with_nothing_pinned(request):
    """Twice pins hid what the newest torch broke. They are for what lints; the last step is what README says."""
    text = (request.config.rootpath / ".ci" / "run").read_text(encoding="utf-8")
    assert "PIP_CONSTRAINT" not in text
    assert [line.split()[0] for line in text.splitlines() if "constraints.txt" in line] == [".venv-ci/bin/pip"]
    pinned = (request.config.rootpath / ".ci" / "constraints.txt").read_text(encoding="utf-8")
    assert not {"torch", "transformers", "pytest", "numpy"} & set(re.findall(r"^[\w-]+", pinned, re.MULTILINE))
    *before, last = text.rstrip("\n").splitlines()
    assert any(line.startswith("unset TORCH_CUDA_ARCH_LIST CMAKE_ARGS ") for line in before)
    assert 'beside tests "${cached[@]}" PYTEST_ADDOPTS="--durations=25" bash -euo pipefail -c "$test_command"' in before
    assert last == 'finish tests && [ "$slow" = 0 ]'
    assert "pytest -q -m slow" in text  # which README's command leaves out
    assert "not slow" in request.config.getini("addopts")
