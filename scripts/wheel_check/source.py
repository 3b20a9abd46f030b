"""Where a wheel comes from: its Python files, license and requirements are those of the commit that it names, and that
commit is one of those that may be published.

Who edits a wheel can make RECORD's hashes anew, but not those that git has of the commit. The libraries cannot be
compared in this way: scripts/rebuild_check.py builds them again.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.markers import Marker
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .wheel import BUILD_INFO, CONVOLUTION, LIB, Wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # check-wheel-contents brings it

ROOT = Path(__file__).resolve().parents[2]
UNCOMPARED = "its Python files could not be compared with their source, nor METADATA and the bill of materials"
SHOWN = 5  # file names in a message
COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class UnknownRef(Exception):
    """A branch or tag that this checkout does not have; the text names it."""


def check_refs(refs: Sequence[str]) -> None:
    for ref in refs:
        if ref.startswith("-") or git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") is None:
            raise UnknownRef(f"{ref!r} is no branch, tag or commit of the checkout in {ROOT}; fetch it first")


def known_commit(wheel: Wheel) -> str | None:
    """The commit that the wheel names, if it is in this checkout."""
    commit = str(wheel.source[0])
    known = COMMIT.fullmatch(commit) and git("cat-file", "-t", commit) == b"commit\n"
    return commit if known else None


def check_allowed(wheel: Wheel, refs: Sequence[str]) -> list[str]:
    """The wheel's commit can be reached from one of these branches and tags."""
    commit = known_commit(wheel)
    if commit is not None and any(
        git("merge-base", "--is-ancestor", commit, f"{ref}^{{commit}}") is not None for ref in refs
    ):
        return []
    told = wheel.source[0]
    source = "it names no commit" if told is None else f"its commit {told} is not among them"
    return [f"only commits of {' and '.join(refs)} may be published, and {source}"]


def check_source(wheel: Wheel) -> tuple[list[str], list[str]]:
    """(problems, notes). Where the commit is not known, a note says that nothing was compared."""
    (commit, changed), told = wheel.source, wheel.sbom if wheel.project == CONVOLUTION else BUILD_INFO
    if changed:
        return [
            f"{told}: it was built from commit {commit} and changes to it, so nobody can tell what is in it or "
            "build it again: commit the changes, then build"
        ], []
    if commit is None:
        return [], [f"{UNCOMPARED}: it was built outside of a git checkout and names no commit"]
    if not COMMIT.fullmatch(str(commit)):
        return [f"{told}: source_commit is {str(commit)[:80]!r}, which is no commit"], []
    if known_commit(wheel) is None:
        return [], [f"{UNCOMPARED}: commit {commit} is not in this checkout; fetch it, or verify where it is"]
    expected = files_of(str(commit), wheel)
    found = {name for name in wheel.files if not name.startswith((LIB, wheel.dist_info)) or name in expected}
    changed = [name for name in found & set(expected) if not same(wheel.files[name], expected[name])]
    required, promised = set(), set()
    if wheel.project != CONVOLUTION:  # whose one requirement its version tells
        required, promised = requirements_in(wheel), requirements_of(commit)
    return [
        f"{listed(names)}: {what} commit {commit}, which the wheel says it was built from"
        for names, what in (
            (changed, "not as in"),
            (found - set(expected), "not in"),
            (set(expected) - found, "missing here, but in"),
            (required - promised, "in METADATA, but not in pyproject.toml of"),
            (promised - required, "not in METADATA, but in pyproject.toml of"),
        )
        if names
    ], []


def requirements_in(wheel: Wheel) -> set[str]:
    """What METADATA requires and offers, as lines of it in one spelling."""
    metadata = Metadata.from_email(wheel.text(wheel.dist_info + "METADATA"))
    return _lines(metadata.requires_dist or [], metadata.provides_extra or [])


def requirements_of(commit: str) -> set[str]:
    """The same of a commit's pyproject.toml; nothing if it has none."""
    text = git("show", f"{commit}:pyproject.toml") or b""
    project = tomllib.loads(text.decode()).get("project", {})
    extras = project.get("optional-dependencies", {})
    requirements = [Requirement(line) for line in project.get("dependencies", [])]
    for extra, lines in extras.items():
        for requirement in map(Requirement, lines):
            condition = f"({requirement.marker}) and " if requirement.marker else ""
            requirement.marker = Marker(f'{condition}extra == "{canonicalize_name(extra)}"')
            requirements.append(requirement)
    return _lines(requirements, list(extras))


def _lines(requirements: list[Requirement], extras: list[str]) -> set[str]:
    for requirement in requirements:
        requirement.name = canonicalize_name(requirement.name)
    return {f"Requires-Dist: {requirement}" for requirement in requirements} | {
        f"Provides-Extra: {canonicalize_name(extra)}" for extra in extras
    }


def files_of(commit: str, wheel: Wheel) -> dict[str, str]:
    """{file in the wheel: git's hash of it}, of what a build copies."""
    files = {}
    for line in (git("ls-tree", "-r", "-z", commit) or b"").decode().split("\0")[:-1]:
        facts, _, path = line.partition("\t")
        if path == "LICENSE":
            files[f"{wheel.dist_info}licenses/LICENSE"] = facts.split()[2]
        elif wheel.project == CONVOLUTION:
            if path.startswith("causal-conv1d/src/"):
                files[path.removeprefix("causal-conv1d/src/")] = facts.split()[2]
        elif path.startswith(("mamba_ssm/", "compat/")):
            files[path.removeprefix("compat/")] = facts.split()[2]
    return files


def git(*words: str) -> bytes | None:
    """What git prints; None if it fails or is not there."""
    # A checkout of another user, as in a container, is read all the same: its scripts are being run.
    command = ["git", "--no-replace-objects", "-c", f"safe.directory={ROOT.as_posix()}", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


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
