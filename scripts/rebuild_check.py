"""Proves that the build is reproducible: builds the committed source twice, in two folders, and compares the wheels.

python scripts/rebuild_check.py [WHEEL]

The two builds differ in their folder (name and length), umask, time zone and locale, and use no compiler cache. With
WHEEL, both are compared with that file too: whether it was built from this commit with these tools. The build switches
are those of the environment. Exit status: 0 the same bytes, 1 not, 2 could not be tried.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# An object file out of a cache would prove nothing.
NO_CACHE = {"CCACHE_DISABLE": "1", "SCCACHE_RECACHE": "1"}
# What must not matter: folder, umask, environment.
SURROUNDINGS = (
    ("a", 0o022, {"TZ": "UTC", "LC_ALL": "C"}),
    ("another-folder-of-another-length/b", 0o077, {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"}),
)


class CannotTry(Exception):
    """A build could not be made; the text says why."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds the committed source twice and compares the wheels.")
    parser.add_argument("wheel", nargs="?", type=Path, metavar="WHEEL", help="a wheel to compare both with")
    given = parser.parse_args(words).wheel
    try:
        if given is not None and not given.is_file():
            raise CannotTry(f"{given} is no file")
        with tempfile.TemporaryDirectory(prefix="rebuild-") as folder:
            status, builds = 0, [build(Path(folder), *surroundings) for surroundings in SURROUNDINGS]
            if given is not None and project_of(given) not in builds[0]:
                raise CannotTry(f"{given} is no wheel of {' or '.join(builds[0])}")
            for project in builds[0]:
                wheels = [each[project] for each in builds]
                if given is not None and project_of(given) == project:
                    wheels.insert(0, given)
                status = max(status, compare(wheels))
            return status
    except CannotTry as error:
        print(f"rebuild_check: {error}", file=sys.stderr)
        return 2


def build(base: Path, name: str, umask: int, variables: dict[str, str]) -> dict[str, Path]:
    """{project: wheel} of a clone of this repository's HEAD in base/name."""
    folder = base / name
    run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], base, umask, variables)
    run([sys.executable, "setup.py", "bdist_wheel"], folder, umask, variables)
    return {project_of(wheel): wheel for wheel in sorted((folder / "dist").glob("*.whl"))}


def project_of(wheel: Path) -> str:
    return wheel.name.partition("-")[0]


def run(command: list[str], folder: Path, umask: int, variables: dict[str, str]) -> None:
    print(f"+ {' '.join(command)}", flush=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **NO_CACHE, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        umask=-1 if sys.platform == "win32" else umask,
    )
    if done.returncode != 0:
        raise CannotTry(f"{command[0]} failed:\n{done.stdout.decode('utf-8', 'replace')[-4000:]}")


def compare(wheels: list[Path]) -> int:
    for wheel in wheels:
        print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}")
    first = wheels[0]
    differences = [line for other in wheels[1:] for line in differences_of(first, other)]
    for line in dict.fromkeys(differences):
        print(f"  {line}")
    print("NOT reproducible" if differences else "reproducible: the same bytes")
    return 1 if differences else 0


def differences_of(one: Path, two: Path) -> list[str]:
    """What differs, from the file name down to the file inside; [] for the same name and bytes."""
    if one.name != two.name:
        return [f"one is named {one.name}, the other {two.name}"]
    if one.read_bytes() == two.read_bytes():
        return []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(two) as second:
        names = [archive.namelist() for archive in (first, second)]
        found = [f"{name}: in one of them only" for name in sorted(set(names[0]) ^ set(names[1]))]
        both = sorted(set(names[0]) & set(names[1]))
        found += [f"{name}: other contents" for name in both if first.read(name) != second.read(name)]
    return found or ["the same contents, packed in another way (order, time, mode or compression)"]


if __name__ == "__main__":
    sys.exit(main())
