"""The last steps of a wheel: bytes that depend on the source alone, and auditwheel's word on a release."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

# A zip archive knows no earlier time.
EARLIEST = 315532800  # 1980-01-01


class ReleaseError(Exception):
    """The wheel would not load on the systems that its tag promises; the text says why."""


def settle(wheel: Path, seconds: int) -> None:
    """Writes the archive anew with one time, one mode and one system for all files.

    setuptools takes each from the building machine: its clock, its umask, Windows' lack of modes.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    pack(files, wheel, seconds)


def pack(files: dict[str, bytes], wheel: Path, seconds: int) -> None:
    fresh = wheel.with_name(wheel.name + ".new")
    with zipfile.ZipFile(fresh, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, time.gmtime(max(seconds, EARLIEST))[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whose modes these are
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data)
    os.replace(fresh, wheel)


def deliver(wheel: Path, folder: Path) -> Path:
    """Moves the wheel into a folder, which may be on another disk, in one step; returns where it now is."""
    target = folder / wheel.name
    fresh = folder / f"{wheel.name}.new"
    try:
        shutil.copyfile(wheel, fresh)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
    wheel.unlink()
    return target


def check_release(wheel: Path, glibc: str) -> None:
    """Asks auditwheel for the oldest systems that the wheel's libraries load on. Raises ReleaseError for newer ones."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # auditwheel wraps its lines.
    found = re.search(r'platform tag: "(\w+)"', " ".join(done.stdout.split()))
    numbers = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", found.group(1)) if found else None
    if numbers is None or tuple(map(int, numbers.groups())) > tuple(map(int, glibc.split("."))):
        raise ReleaseError(f"auditwheel does not find {wheel.name} fit for glibc {glibc}:\n{done.stdout.strip()}")
    print(f"auditwheel: {wheel.name} loads on {found.group(1)} and newer")
