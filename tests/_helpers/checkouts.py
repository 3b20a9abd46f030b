"""Repositories of this source tree, made for a test."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IGNORED = shutil.ignore_patterns("lib", "*.egg-info", "__pycache__")  # as git does
AS_SOMEBODY = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]


def git(folder, *words):
    command = ["git", "-C", str(folder), *AS_SOMEBODY, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_of_this_tree(folder):
    """Makes `folder` a repository with what decides a wheel's texts in its one commit."""
    for name in ("mamba_ssm", "compat", "causal-conv1d", "scripts/wheel_build"):
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder
