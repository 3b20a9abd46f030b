"""Version, local label, wheel tag and wheel name."""

from __future__ import annotations

import re
from pathlib import Path

NAME = "mamba_ssm"
# The oldest glibc that release builds load on: RHEL 8, Debian 10, Ubuntu 20.04. zig links for it, the tag names it.
RELEASE_GLIBC = "2.28"


def base_version(root: Path) -> str:
    """The version that mamba_ssm/version.py holds, read without importing the package (which needs torch)."""
    text = (root / "mamba_ssm" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('mamba_ssm/version.py holds no line __version__ = "..."')
    return match.group(1)


def is_sdist(root: Path) -> bool:
    """PKG-INFO at the root is what tells an unpacked sdist from a checkout."""
    return (root / "PKG-INFO").is_file()


def local_label(chosen: str, cuda: bool, nvcc_version: tuple[int, int] | None, debug: bool = False) -> str:
    """MAMBA_LOCAL_VERSION, else cu130 for nvcc 13.0, else cpu. With ".debug" a DEBUG wheel replaces no other."""
    label = chosen or (f"cu{nvcc_version[0]}{nvcc_version[1]}" if cuda and nvcc_version is not None else "cpu")
    return f"{label}.debug" if debug else label


def wheel_version(base: str, label: str, from_sdist: bool) -> str:
    """pip refuses a wheel whose version differs from its sdist's, so a wheel from an sdist keeps that version."""
    return base if from_sdist else f"{base}+{label}"


def platform_tag(platform: str, machine: str, release: bool = False) -> str:
    """linux_x86_64, manylinux_2_28_x86_64 for a release, win_amd64; others, which preflight refuses, plainly."""
    if platform == "win32":
        return "win_amd64" if machine.lower() in ("amd64", "x86_64") else f"win_{machine.lower()}"
    system = "macosx" if platform == "darwin" else platform
    if release and system == "linux":
        system = f"manylinux_{RELEASE_GLIBC.replace('.', '_')}"
    machine = "x86_64" if machine.lower() == "amd64" else machine.lower()
    return f"{system}_{machine}"


def wheel_tag(platform: str, machine: str, release: bool = False) -> tuple[str, str, str]:
    """No Python and no ABI in the tag: the libraries speak a C ABI that ctypes calls."""
    return "py3", "none", platform_tag(platform, machine, release)


def wheel_name(version: str, platform: str, machine: str, release: bool = False) -> str:
    return f"{NAME}-{version}-{'-'.join(wheel_tag(platform, machine, release))}.whl"


def library_names(platform: str, cuda: bool) -> list[str]:
    names = ["mamba_cpu", "mamba_cuda"] if cuda else ["mamba_cpu"]
    return [f"{name}.dll" if platform == "win32" else f"lib{name}.so" for name in names]
