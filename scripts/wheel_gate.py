"""What wheels must pass before publish.py and make_index.py let them out: verified, and on request signed and rebuilt.

Each file is read once. `wheel.data` of what passes are the bytes that were verified, and the only ones to publish.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import rebuild_check
import sign_wheels
from terminal import printable
from wheel_check import MACHINE_CODE, UnknownRef, verify_to_publish
from wheel_check.wheel import BUILD_INFO, Wheel


@dataclass(frozen=True)
class Outcome:
    wheels: list[Wheel]  # those that passed, without their libraries and modules unpacked
    problems: list[str]  # why nothing may be published; [] if all passed
    notes: list[str]  # what could not be checked, without strict


def add_verify_options(parser: argparse.ArgumentParser, strict: bool) -> None:
    """What verify_wheel.py asks for, too. `strict`: the default."""
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=strict,
        help="refuse a wheel that cannot be compared with its commit. With --no-strict it passes with a note: nobody "
        f"has checked then that its Python files and metadata are yours (default: --{'' if strict else 'no-'}strict)",
    )
    parser.add_argument(
        "--allow-commits",
        nargs="+",
        action="extend",
        metavar="REF",
        help="refuse wheels of commits that none of these branches or tags contains; write it after the wheels",
    )


def check_verify_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if any(ref.endswith(".whl") for ref in options.allow_commits or ()):
        parser.error("a wheel stands where --allow-commits expects a branch or tag: name the wheels first")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_verify_options(parser, strict=True)
    parser.add_argument(
        "--signatures",
        type=Path,
        metavar="DIR",
        help=f"publish only what {sign_wheels.LIST} in DIR lists, signed as sign_wheels.py --sign does",
    )
    parser.add_argument(
        "--signed-by",
        metavar="FINGERPRINT",
        help="the key that must have signed; without this, one that your gpg trusts fully",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="build each wheel again from its commit (this runs that commit's code) and compare the bytes",
    )


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where options of the gate do not go together."""
    check_verify_options(parser, options)
    if options.signed_by and not options.signatures:
        parser.error("--signed-by says whose signature to accept: name its folder with --signatures")


def admit(paths: Iterable[Path], options: argparse.Namespace) -> Outcome:
    """Every file must pass all but --rebuild, and all reasons are collected."""
    wheels, problems, notes, signed = [], [], [], None
    if options.signatures is not None:
        try:
            signed = sign_wheels.signed_hashes(options.signatures, options.signed_by)
        except sign_wheels.NotSigned as error:
            problems.append(str(error))
    for path in paths:
        try:
            verdict = verify_to_publish(path, strict=options.strict, allow_commits=options.allow_commits)
        except UnknownRef as error:
            return Outcome([], [*problems, f"--allow-commits: {error}"], notes)
        found = list(verdict.problems)
        if verdict.wheel is not None and signed is not None:
            found += _compare(verdict.wheel, signed, options.signatures)
        same_name = [wheel for wheel in wheels if wheel.path.name == path.name]
        if verdict.wheel is not None and any(wheel.data != verdict.wheel.data for wheel in same_name):
            found.append(f"{same_name[0].path} has this name too, and other bytes: name one of them")
        if verdict.wheel is not None and not found and not same_name:
            wheels.append(_slim(verdict.wheel))
        problems += [printable(f"{path}: {problem}") for problem in found]
        notes += [f"{path.name}: {note}" for note in verdict.notes if not (options.rebuild and note == MACHINE_CODE)]
    return Outcome(wheels, problems, notes)


def rebuild(wheels: Iterable[Wheel], options: argparse.Namespace) -> list[str]:
    """Why the wheels are not what their commits make, where --rebuild asks; takes long, so it comes last."""
    if not options.rebuild:
        return []
    return [f"{wheel.path}: {problem}" for wheel in wheels for problem in rebuild_check.problems_of(wheel)]


def _compare(wheel: Wheel, signed: dict[str, str], folder: Path) -> list[str]:
    listed, own = signed.get(wheel.path.name), hashlib.sha256(wheel.data).hexdigest()
    if listed is None:
        return [f"{folder / sign_wheels.LIST} does not list it, so it is not signed: {sign_wheels.CURE}"]
    if listed != own:
        return [
            f"{folder / sign_wheels.LIST} was signed for other bytes (sha256 {listed}, this file has {own}): publish "
            f"the file that was signed. If this one is right, {sign_wheels.CURE}"
        ]
    return []


def _slim(wheel: Wheel) -> Wheel:
    """Without what takes memory, besides the file itself."""
    kept = {name: data for name, data in wheel.files.items() if name.startswith(wheel.dist_info) or name == BUILD_INFO}
    return replace(wheel, files=kept)
