"""Where a wheel comes from: its Python files and license are those of the commit that it names.

Who edits a wheel can make RECORD's hashes anew, but not those that git has of the commit. The libraries cannot be
compared in this way: scripts/rebuild_check.py builds them again.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

from .wheel import BUILD_INFO, LIB, Wheel

ROOT = Path(__file__).resolve().parents[2]
UNCOMPARED = "its Python files could not be compared with their source"
SHOWN = 5  # file names in a message


def check_source(wheel: Wheel) -> tuple[list[str], list[str]]:
    """(problems, notes). Where the commit is not known, a note says that nothing was compared."""
    commit = wheel.build_info.get("source_commit")
    if wheel.build_info.get("source_dirty"):
        return [
            f"{BUILD_INFO}: it was built from commit {commit} and changes to it, so nobody can tell what is in it or "
            "build it again: commit the changes, then build"
        ], []
    if commit is None:
        return [], [f"{UNCOMPARED}: it was built outside of a git checkout and names no commit"]
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", str(commit)):
        return [f"{BUILD_INFO}: source_commit is {commit!r}, which is no commit"], []
    expected = files_of(commit, f"{wheel.dist_info}licenses/LICENSE")
    if expected is None:
        return [], [f"{UNCOMPARED}: commit {commit} is not in this checkout; fetch it, or verify where it is"]
    found = {name for name in wheel.files if name in expected or name.startswith("mamba_ssm/")}
    found = {name for name in found if not name.startswith(LIB)}
    changed = [name for name in found & set(expected) if not same(wheel.files[name], expected[name])]
    return [
        f"{listed(names)}: {what} commit {commit}, which the wheel says it was built from"
        for names, what in (
            (changed, "not as in"),
            (found - set(expected), "not in"),
            (set(expected) - found, "missing here, but in"),
        )
        if names
    ], []


def files_of(commit: str, license_file: str) -> dict[str, str] | None:
    """{file in a wheel: git's hash of it}, of what a build copies; None if git does not know the commit."""
    # A checkout of another user, as in a container, is read all the same: its scripts are being run.
    command = ["git", "-c", f"safe.directory={ROOT.as_posix()}", "-C", str(ROOT), "ls-tree", "-r", "-z", commit]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:  # no git
        return None
    if done.returncode != 0:
        return None
    files = {}
    for line in done.stdout.decode().split("\0")[:-1]:
        facts, _, path = line.partition("\t")
        if path == "LICENSE" or path.startswith("src/mamba_ssm/"):
            files[license_file if path == "LICENSE" else path.removeprefix("src/")] = facts.split()[2]
    return files


def same(data: bytes, expected: str) -> bool:
    """Whether git has this hash of the file, whose line ends may be those of a checkout on Windows."""
    algorithm = {40: "sha1", 64: "sha256"}[len(expected)]
    return any(
        hashlib.new(algorithm, b"blob %d\0" % len(text) + text).hexdigest() == expected
        for text in (data, data.replace(b"\r\n", b"\n"))
    )


def listed(names: list[str] | set[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more
