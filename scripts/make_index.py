"""Makes a static package index of a folder of wheels, or adds wheels to one: python scripts/make_index.py wheels/ site/

    site/index.html                     for people: labels, what each needs, install lines, files
    site/files/*.whl, *.whl.metadata    every wheel once, with its metadata beside it (PEP 658, 714)
    site/cu130/, site/cpu/, ...         one index for each local label of mamba_ssm, and one that holds
    site/all/                           everything: index.html (PEP 503) and index.json (PEP 691, 700) in
                                        LABEL/ and LABEL/mamba-ssm/; wheels of causal-conv1d, which fit every label,
                                        are in LABEL/causal-conv1d/
    site/yanked.txt                     which wheels are yanked (PEP 592), and why: edit it and run this again

All links are relative: the folder can be served at any address, or used as file:///. Each wheel is read once and
verified (scripts/verify_wheel.py --strict); the bytes that were verified are written. A file once published never
changes or disappears: if one would, if a wheel has a problem, or if the site was changed by other hands, every reason
is printed, nothing is written and the exit status is 1. Files appear before the pages that name them and each is
replaced in one step, so a reader never meets half a site; a run that was cut off is made good by the next.
Needs the extra: pip install "WHEEL[publish]"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from terminal import say

try:
    import filelock
    from static_index import yanked
    from static_index.files import PROJECTS, File, file_of
    from static_index.pages import EVERYTHING, FILES, OVERVIEW, pages
    from wheel_check.wheel import Unreadable, Wheel, read_wheel
    from wheel_gate import add_options, admit, check_options, rebuild
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name and error.name.startswith(("static_index", "wheel_"))):
        raise
    sys.exit(
        f"make_index.py needs {error.name}, which is not installed here; with the file of any wheel of mamba_ssm do: "
        'pip install "WHEEL[publish]"'
    )

RECORDS = [f"{EVERYTHING}/{project}/index.json" for project in PROJECTS]
RESERVED = (FILES, EVERYTHING, OVERVIEW, yanked.NAME)
PATIENCE = 60.0  # seconds to wait for another run on the same site
CURE = "restore that file from a backup; to withdraw a wheel, write it into yanked.txt"


class IndexRefused(Exception):
    """The index cannot be made; the text is the reasons, a line each."""


def write(path: Path, data: bytes) -> None:
    """Replaces a file in one step, and only if it changes, so that a copying tool sees what is new."""
    if path.is_file() and not path.is_symlink() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # left by a run that was cut off
    try:
        with open(part, "xb") as file:  # x: never through a link that somebody put there
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_record(site: Path) -> dict[str, dict]:
    """{file name: what the site says of it} of the files published so far."""
    records = [site / record for record in RECORDS if (site / record).exists()]
    # A first run that was cut off leaves files and no record.
    if not records and site.is_dir() and not (site / FILES).is_dir():
        strange = [path for path in site.iterdir() if not path.name.startswith(".")]
        if strange:
            raise IndexRefused(f"{site} holds other things and no index: name a new or empty folder")
    return {name: entry for record in records for name, entry in _entries(record).items()}


def _entries(record: Path) -> dict[str, dict]:
    try:
        entries = {
            entry["filename"]: entry | {"sha256": entry["hashes"]["sha256"]}
            for entry in json.loads(record.read_bytes())["files"]
        }
        if any(name != os.path.basename(name) for name in entries):
            raise ValueError("a file name of it has a folder")
    except (ValueError, KeyError, TypeError) as error:
        raise IndexRefused(
            f"{record} lists what is published and cannot be read ({type(error).__name__}: {error}): restore it from a "
            "backup, or make a new site of the wheels in an empty folder"
        ) from error
    return entries


def read_published(site: Path, record: dict[str, dict], problems: list[str]) -> list[File]:
    """The files that were published, if they are there byte for byte. Adds to `problems`."""
    files = []
    for name, entry in record.items():
        path, was = site / FILES / name, f"was published (sha256 {entry['sha256']}) and"
        if not path.is_file():
            problems.append(f"{path}: {was} is gone: {CURE}")
            continue
        try:
            wheel = read_wheel(path)
        except Unreadable as error:
            problems.append(f"{path}: {was} {error}: {CURE}")
            continue
        file = file_of(wheel, entry.get("upload-time") or _now(), new=False)
        if file.sha256 == entry["sha256"]:
            files.append(file)
        else:
            problems.append(f"{path}: {was} now has sha256 {file.sha256}: {CURE}")
    return files


def read_new(
    wheels: Path, site: Path, record: dict[str, dict], options: argparse.Namespace, problems: list[str]
) -> list[Wheel]:
    """The wheels to add to the index, verified. Adds to `problems`; prints what could not be verified."""
    # What is in the site and not in its record was left by a run that was cut off, or put there by hand.
    new = [path for path in sorted((site / FILES).glob("*.whl")) if path.name not in record]
    for path in sorted(wheels.glob("*.whl")):
        published = site / FILES / path.name
        if not published.exists():
            new.append(path)
        elif (one := _sha256(published)) != (other := _sha256(path)):
            problems.append(
                f"{path}: {path.name} is published with other bytes (sha256 {one}, this one has {other}). A published "
                "file never changes: give the new build another version or label"
            )
    outcome = admit(new, options)
    problems += outcome.problems
    for note in outcome.notes:
        say(f"note       {note}")
    for wheel in outcome.wheels:
        if (label := wheel.version.local) in RESERVED:
            problems.append(
                f"{wheel.path}: its label {label!r} is a file or folder of every index: build it with another "
                "MAMBA_LOCAL_VERSION"
            )
    return outcome.wheels


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def mark_yanked(
    site: Path, files: list[File], named: set[str], record: dict[str, dict], problems: list[str]
) -> list[File]:
    """The files with the reasons of yanked.txt. Adds to `problems`."""
    before = {name for name, entry in record.items() if entry.get("yanked")}
    try:
        reasons = yanked.read_yanked(site, {file.name for file in files} | named | set(record), before)
    except yanked.WrongEntry as error:
        problems.append(str(error))
        return files
    return [replace(file, yanked=reasons.get(file.name, "")) for file in files]


def make_index(wheels: Path, site: Path, options: argparse.Namespace) -> list[str]:
    """Adds every wheel in the folder `wheels` to the index in the folder `site`; returns a line for each file.

    Raises IndexRefused, before anything is written, if a wheel is not fit or the site not what was published.
    """
    if not wheels.is_dir():
        raise IndexRefused(f"{wheels} is no folder of wheels")
    record, problems = read_record(site), []
    files = read_published(site, record, problems)
    new, now = read_new(wheels, site, record, options, problems), _now()
    files += [file_of(wheel, now, new=True) for wheel in new]
    named = {path.name for path in wheels.glob("*.whl")}
    files = mark_yanked(site, files, named, record, problems)
    if problems:
        raise IndexRefused("\n".join(problems))
    if not files:
        raise IndexRefused(f"{wheels} holds no wheel (*.whl) to make an index of")
    if problems := rebuild(new, options):
        raise IndexRefused("\n".join(problems))
    files.sort(key=lambda file: file.name)
    files.sort(key=lambda file: file.version, reverse=True)
    for file in files:
        if file.data is not None:
            write(site / FILES / file.name, file.data)
        write(site / FILES / f"{file.name}.metadata", file.metadata)
    for name, data in pages(files):
        write(site / name, data)
    if not (site / yanked.NAME).exists():
        write(site / yanked.NAME, yanked.TEXT.encode())
    shown = [file for file in files if file.data is not None or file.name in named]
    again = [file for file in files if record.get(file.name, {}).get("yanked") and not file.yanked]
    return [
        *sorted(f"{'published' if file.data is None else 'added':10} {file.name}" for file in shown),
        *(f"yanked     {file.name}: {file.yanked}" for file in files if file.yanked),
        *(f"unyanked   {file.name}: it is offered again" for file in again),
    ]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes a static package index of a folder of wheels, or adds to one.")
    parser.add_argument("wheels", type=Path, help="the folder with the wheels; without new ones, SITE/files will do")
    parser.add_argument("site", type=Path, help="the folder of the index: new, empty, or made by this program before")
    add_options(parser)
    options = parser.parse_args(words)
    check_options(parser, options)
    try:
        read_record(options.site)  # a folder that is something else gets not even the lock
        options.site.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(options.site / ".lock", timeout=PATIENCE):
            lines = make_index(options.wheels, options.site, options)
    except filelock.Timeout:
        say(f"another run is at work on {options.site} and did not end in {PATIENCE:.0f} s: try later", file=sys.stderr)
        return 1
    except IndexRefused as error:
        say("the index was not changed:", *str(error).split("\n"), file=sys.stderr)
        return 1
    except (Unreadable, OSError) as error:
        whole = "The index is whole, and may lack what was to be added: when the cause is gone, run this again"
        say(str(error), whole, file=sys.stderr)
        return 1
    for path in sorted(options.wheels.glob("*.tar.gz")):
        say(f"left out   {path.name}: pip would build an sdist wherever no wheel fits")
    say(*lines, f"{options.site}/index.html is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
