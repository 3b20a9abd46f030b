"""mamba_ssm/lib/build_info.json: what the libraries beside it are, for the doctor and for error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import cmake, facts
from .plan import Plan

# An sdist has no git; its commit waits in this file, which `setup.py sdist` writes into it.
SOURCE_FILE = "SOURCE_COMMIT"


def abi_version(root: Path) -> int:
    text = (root / "csrc" / "include" / "mamba_kernels.h").read_text(encoding="utf-8")
    match = re.search(r"^#define MAMBA_ABI_VERSION (\d+)$", text, re.MULTILINE)
    if match is None:
        raise RuntimeError("csrc/include/mamba_kernels.h defines no MAMBA_ABI_VERSION")
    return int(match.group(1))


def source_commit(root: Path) -> tuple[str, bool]:
    """(commit, tracked files changed) of the checkout or, in an unpacked sdist, of the one it was made from."""
    commit, dirty = facts.git_state(root)
    file = root / SOURCE_FILE
    if not commit and file.is_file():
        words = file.read_text(encoding="utf-8").split()
        return (words[0] if words else ""), "changed" in words
    return commit, dirty


def source_line(root: Path) -> str:
    commit, dirty = source_commit(root)
    return f"{commit} changed\n" if dirty else f"{commit}\n"


def describe(plan: Plan, root: Path, folder: Path) -> dict:
    """No times and no paths: the same source and tools give the same file."""
    commit, dirty = source_commit(root)
    toolchains = cmake.toolchains(folder)
    return {
        "package_version": plan.base_version,
        "local_label": plan.label,
        "cuda": plan.cuda,
        "nvcc_version": plan.facts.nvcc_full_version if plan.cuda else None,
        "host_compiler": toolchains.get("CXX", ""),
        "architectures": plan.architectures.cmake,
        "dtypes": plan.config.dtypes,
        "flags": cmake.flags(folder),
        "debug": plan.config.debug,
        "abi_version": abi_version(root),
        "source_commit": commit or None,
        "source_dirty": dirty,
    }


def text(info: dict) -> str:
    return json.dumps(info, indent=2) + "\n"
