"""Is this wheel what the project builds, whole and unchanged? Reads wheels of Linux and Windows on either system.

Nothing of the wheel is run or imported. Needs the packages of the extra: pip install "WHEEL[publish]"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from terminal import printable

from . import contents, leaks, libraries, made, metadata, source
from .source import UnknownRef as UnknownRef
from .wheel import CONVOLUTION, Unreadable, Wheel, read_wheel

ANY = (contents.check_record, contents.check_fixed, metadata.check_names)
CHECKS = {
    "mamba_ssm": (
        *ANY,
        metadata.check_build_info,
        metadata.check_requirements,
        contents.check_contents,
        contents.check_recorded_libraries,
        contents.check_sbom,
        libraries.check_libraries,
        leaks.check_leaks,
    ),
    CONVOLUTION: (
        *ANY,
        metadata.check_convolution,
        contents.check_convolution,
        contents.check_sbom,
        leaks.check_leaks,
    ),
}


# Who changes a library can make every hash anew.
MACHINE_CODE = "only scripts/rebuild_check.py, which builds them again, can say whether its libraries are its commit's"


@dataclass(frozen=True)
class Verdict:
    problems: list[str]  # why it is refused, in printable lines; [] if it is fit
    notes: list[str]  # what could not be checked, or is odd and not refused
    wheel: Wheel | None  # None if unreadable; wheel.data are the very bytes that were verified


def verify(path: str | Path) -> list[str]:
    """The problems of the wheel at `path`, each a line that names the file within and the reason; [] if it is sound.

    Never raises for what the file holds: a wheel that cannot be read is a wheel with a problem.
    """
    try:
        return [printable(problem) for problem in problems_of(read_wheel(Path(path)))]
    except Unreadable as error:
        return [printable(str(error))]


def verify_to_publish(path: str | Path, *, strict: bool = False, allow_commits: Sequence[str] | None = None) -> Verdict:
    """`verify`, then whether the wheel is its commit's.

    strict: what could not be compared with the commit, or is not as the build makes it there, is a problem, not a note.
    allow_commits: branches and tags of this checkout; the wheel's commit must be reachable from one of them. Raises
        UnknownRef for one that is not there.
    """
    source.check_refs(allow_commits or ())
    try:
        wheel = read_wheel(Path(path))
    except Unreadable as error:
        return Verdict([printable(str(error))], [], None)
    problems, doubts, notes = problems_of(wheel), [], []
    if not problems:
        with guarded(source.check_source, problems):
            found, doubts = source.check_source(wheel)
            problems += found
            doubts += made.check_made(wheel)
            if allow_commits is not None:
                problems += source.check_allowed(wheel, allow_commits)
    (problems if strict else notes).extend(doubts)
    if not problems and wheel.libraries:
        notes.append(MACHINE_CODE)
    return Verdict([printable(problem) for problem in problems], [printable(note) for note in notes], wheel)


def problems_of(wheel: Wheel) -> list[str]:
    problems = []
    for check in CHECKS[wheel.project]:
        with guarded(check, problems):
            problems += check(wheel)
    return list(dict.fromkeys(problems))


@contextmanager
def guarded(check: Callable, problems: list[str]) -> Iterator[None]:
    """Whatever a damaged file does to a parser, the wheel is refused and the other checks still speak."""
    try:
        yield
    except Exception as error:
        what = check.__name__.removeprefix("check_").replace("_", " ")
        problems.append(f"its {what} cannot be read: {type(error).__name__}: {error}")
