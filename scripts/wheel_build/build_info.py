"""mamba_ssm/lib/build_info.json: what the libraries beside it are, for the doctor and for error messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Source:
    commit: str = ""
    seconds: int = 0  # the commit's time since 1970
    changed: bool = False  # tracked files differ from it


def source_of(root: Path) -> Source:
    """Of the checkout or, in an unpacked sdist, of the one it was made from; Source() where neither is known."""
    commit, seconds, changed = facts.git_state(root)
    file = root / SOURCE_FILE
    if commit or not file.is_file():
        return Source(commit, seconds, changed)
    words = file.read_text(encoding="utf-8").split()
    return Source(words[0], int(words[1]), "changed" in words) if len(words) > 1 else Source()


def source_line(root: Path) -> str:
    source = source_of(root)
    words = [source.commit, str(source.seconds), "changed" if source.changed else ""] if source.commit else []
    return " ".join(word for word in words if word) + "\n"


def describe(plan: Plan, root: Path, folder: Path, libraries: Iterable[Path]) -> dict:
    """No times and no paths: the same source and tools give the same file.

    `folder`: CMake's. `libraries`: the files as they are installed; nothing may change them afterwards.
    """
    source = source_of(root)
    toolchains = cmake.toolchains(folder)
    # Under pip nobody saw this line of the plan.
    chosen = {"editable": plan.chosen} if plan.chosen else {}
    return {
        "package_version": plan.base_version,
        "local_label": plan.label,
        "cuda": plan.cuda,
        "nvcc_version": plan.facts.nvcc_full_version if plan.cuda else None,
        "host_compiler": toolchains.get("CXX", ""),
        "cross_built": None,  # the Windows gate's wheels say here how they came about
        "glibc": plan.glibc or None,
        "linker": f"zig {plan.facts.zig.version}" if plan.glibc and plan.facts.zig else None,
        "architectures": plan.architectures.cmake,
        "dtypes": plan.config.dtypes,
        "flags": cmake.flags(folder),
        "debug": plan.config.debug,
        "abi_version": abi_version(root),
        # So that a file that was cut off is found before it is opened.
        "libraries": {path.name: recorded(path.read_bytes()) for path in libraries},
        "source_commit": source.commit or None,
        "source_dirty": source.changed,
        **chosen,
    }


def recorded(library: bytes) -> dict:
    return {"size": len(library), "sha256": hashlib.sha256(library).hexdigest()}


def text(info: dict) -> str:
    return json.dumps(info, indent=2) + "\n"
