"""Proves that the build is reproducible: builds the committed source twice, in two folders, and compares the wheels.

python scripts/rebuild_check.py [WHEEL]

The two builds differ in their folder (name and length), umask, time zone and locale, and use no compiler cache. With
WHEEL, both are compared with that file too: whether it was built from this commit with these tools. The build switches
are those of the environment. Exit status: 0 the same bytes, 1 not, 2 could not be tried.

`--rebuild` of publish.py and make_index.py calls problems_of: one build of the commit that a wheel names, compared with
the wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from terminal import say
from wheel_build import cuda, tools

if TYPE_CHECKING:
    from wheel_check.wheel import Wheel

ROOT = Path(__file__).resolve().parents[1]
# An object file out of a cache would prove nothing.
NO_CACHE = {"CCACHE_DISABLE": "1", "SCCACHE_RECACHE": "1"}
# What must not matter: folder, umask, environment.
SURROUNDINGS = (
    ("a", 0o022, {"TZ": "UTC", "LC_ALL": "C"}),
    ("another-folder-of-another-length/b", 0o077, {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"}),
)
BUILD = ("setup.py", "bdist_wheel")
# The wheel that needs no compiler, alone.
BUILD_CONVOLUTION = (
    "-c",
    "import os, pathlib, sys\n"
    "sys.path.insert(0, 'scripts')\n"
    "from wheel_build import config, convolution\n"
    "pathlib.Path('dist').mkdir()\n"
    "convolution.build(pathlib.Path.cwd(), pathlib.Path('dist'), config.read_config(os.environ).source_date)\n",
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
        say(*f"rebuild_check: {error}".split("\n"), file=sys.stderr)
        return 2


def problems_of(wheel: Wheel) -> list[str]:
    """Why the wheel is not what its commit makes with the tools that are here; [] for the same bytes.

    Runs that commit's build. The switches that build_info.json tells are the wheel's, all others the environment's.
    """
    commit, _ = wheel.source
    pure = wheel.tag.endswith("-any")
    say(f"building {wheel.path.name} again from commit {commit}")
    try:
        if commit is None:
            raise CannotTry("it names no commit")
        switches = {} if pure else switches_of(wheel)
        with tempfile.TemporaryDirectory(prefix="rebuild-") as folder:
            command = BUILD_CONVOLUTION if pure else BUILD
            made = build(Path(folder), "source", 0o022, switches, str(commit), command).get(wheel.project)
            if made is None:
                raise CannotTry(f"the build of commit {commit} makes no wheel of {wheel.project}")
            found = differences(wheel.path.name, wheel.data, made.name, made.read_bytes())
    except CannotTry as error:
        return [f"it cannot be built again here: {error}"]
    return [f"built again from commit {commit}, it differs: {'; '.join(found)}"] if found else []


def switches_of(wheel: Wheel) -> dict[str, str]:
    """The switches that this wheel was built with. Raises CannotTry where this machine could not build it."""
    info = wheel.build_info
    if wheel.windows != (sys.platform == "win32"):
        raise CannotTry(f"{wheel.tag} is of another system: build it again there")
    if info.get("cuda"):
        nvcc = tools.discover(os.environ).nvcc
        here = cuda.parse_nvcc_version(tools.run(nvcc.path, "--version")) if nvcc else None
        if here is None or here[1] != info.get("nvcc_version"):
            raise CannotTry(
                f"it was built with nvcc {info.get('nvcc_version')}, and here is {here[1] if here else 'none'}: use a "
                "machine that has that version"
            )
    off = {True: "0", False: "1"}
    debug = bool(info.get("debug"))
    return {
        "MAMBA_SSM_CUDA": "on" if info.get("cuda") else "off",
        "TORCH_CUDA_ARCH_LIST": " ".join(info.get("architectures") or []),
        "MAMBA_RELEASE": "1" if info.get("glibc") else "0",
        "MAMBA_LOCAL_VERSION": str(info.get("local_label")).removesuffix(".debug" if debug else ""),
        "DEBUG": "1" if debug else "0",
        "MM_DISABLE_HALF": off["float16" in info.get("dtypes", ())],
        "MM_DISABLE_BF16": off["bfloat16" in info.get("dtypes", ())],
    }


def build(
    base: Path, name: str, umask: int, variables: dict[str, str], commit: str = "HEAD", command: tuple[str, ...] = BUILD
) -> dict[str, Path]:
    """{project: wheel} of a clone of this repository in base/name, at `commit`."""
    folder = base / name
    run(["git", "clone", "--quiet", "--no-hardlinks", "--no-checkout", str(ROOT), str(folder)], base, umask, variables)
    run(["git", "checkout", "--quiet", "--detach", commit], folder, umask, variables)
    run([sys.executable, *command], folder, umask, variables)
    return {project_of(wheel): wheel for wheel in sorted((folder / "dist").glob("*.whl"))}


def project_of(wheel: Path) -> str:
    return wheel.name.partition("-")[0]


def run(command: list[str], folder: Path, umask: int, variables: dict[str, str]) -> None:
    say("+ " + " ".join(word if "\n" not in word else "..." for word in command))
    # A build is no place for the password of an index.
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("TWINE_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environ, **NO_CACHE, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        umask=-1 if sys.platform == "win32" else umask,
    )
    if done.returncode != 0:
        raise CannotTry(f"{command[0]} failed:\n{done.stdout.decode('utf-8', 'replace')[-4000:]}")


def compare(wheels: list[Path]) -> int:
    for wheel in wheels:
        say(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}")
    first = wheels[0]
    differences = [line for other in wheels[1:] for line in differences_of(first, other)]
    say(*(f"  {line}" for line in dict.fromkeys(differences)))
    say("NOT reproducible" if differences else "reproducible: the same bytes")
    return 1 if differences else 0


def differences_of(one: Path, two: Path) -> list[str]:
    return differences(one.name, one.read_bytes(), two.name, two.read_bytes())


def differences(name: str, data: bytes, other_name: str, other: bytes) -> list[str]:
    """What differs, from the file name down to the file inside; [] for the same name and bytes."""
    if name != other_name:
        return [f"one is named {name}, the other {other_name}"]
    if data == other:
        return []
    with zipfile.ZipFile(io.BytesIO(data)) as first, zipfile.ZipFile(io.BytesIO(other)) as second:
        names = [archive.namelist() for archive in (first, second)]
        found = [f"{name}: in one of them only" for name in sorted(set(names[0]) ^ set(names[1]))]
        for name in sorted(set(names[0]) & set(names[1])):
            if first.read(name) != second.read(name):
                found.append(f"{name}: other contents{facts_that_differ(name, first.read(name), second.read(name))}")
    return found or ["the same contents, packed in another way (order, time, mode or compression)"]


def facts_that_differ(name: str, one: bytes, two: bytes) -> str:
    """Of build_info.json: other tools are the usual cause of other bytes."""
    if not name.endswith("/build_info.json"):
        return ""
    try:
        infos = [json.loads(text) for text in (one, two)]
        keys = [key for key in infos[0] if key != "libraries" and infos[0][key] != infos[1].get(key)]
    except (ValueError, TypeError, AttributeError):
        return ""
    told = ", ".join(f"{key} {infos[0][key]!r} and {infos[1].get(key)!r}" for key in keys)
    return f" ({told})" if told else ""


if __name__ == "__main__":
    sys.exit(main())
