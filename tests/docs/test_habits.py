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
