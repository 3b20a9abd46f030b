"""Makes a static package index of a folder of wheels, or adds wheels to one: python scripts/make_index.py wheels/ site/

    site/index.html                     for people: labels, what each needs, install lines, files
    site/files/*.whl, *.whl.metadata    every wheel once, with its metadata beside it (PEP 658, 714)
    site/cu130/, site/cpu/, ...         one index for each local label of mamba_ssm, and one that holds
    site/all/                           everything: index.html (PEP 503) and index.json (PEP 691, 700) in
                                        LABEL/ and LABEL/mamba-ssm/; wheels of causal-conv1d, which fit every label,
                                        are in LABEL/causal-conv1d/

All links are relative: the folder can be served at any address, or used as file:///. Each wheel is verified first
(scripts/verify_wheel.py). A file once published never changes or disappears: if one would, if a wheel has a problem, or
if the site was changed by other hands, every reason is printed, nothing is written and the exit status is 1. Files
appear before the pages that name them and each is replaced in one step, so a reader never meets half a site; a run that
was cut off is made good by the next. Needs the extra: pip install "WHEEL[publish]"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

try:
    import filelock
    import jinja2
    from packaging.version import Version
    from wheel_build.advice import driver_needed
    from wheel_check import verify_to_publish
    from wheel_check.wheel import CONVOLUTION, Unreadable, read_wheel
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name and error.name.startswith("wheel_check")):
        raise
    sys.exit(
        f"make_index.py needs {error.name}, which is not installed here; with the file of any wheel of mamba_ssm do: "
        'pip install "WHEEL[publish]"'
    )

PROJECT, CONVOLUTION_PROJECT = PROJECTS = "mamba-ssm", CONVOLUTION.replace("_", "-")
FILES, EVERYTHING = "files", "all"
RECORDS = [f"{EVERYTHING}/{project}/index.json" for project in PROJECTS]
PATIENCE = 60.0  # seconds to wait for another run on the same site
# Compute capability -> GPUs that people know by name.
GPUS = {
    "7.5": "RTX 20, T4",
    "8.0": "A100",
    "8.6": "RTX 30, A10",
    "8.9": "RTX 40, L4",
    "9.0": "H100, H200",
    "10.0": "B200",
    "10.3": "B300",
    "12.0": "RTX 50",
}


class IndexRefused(Exception):
    """The index cannot be made; the text is the reasons, a line each."""


@dataclass(frozen=True)
class File:
    """What the pages say of a published wheel."""

    project: str
    path: Path
    sha256: str
    size: int
    uploaded: str  # ISO 8601 in UTC
    version: Version
    platform: str  # of the wheel's tag
    metadata: bytes
    build_info: dict  # {} of a wheel without libraries

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def label(self) -> str:
        return self.version.local

    @property
    def metadata_sha256(self) -> str:
        return hashlib.sha256(self.metadata).hexdigest()

    @property
    def requires_python(self) -> str:
        return re.search(rb"^Requires-Python: *(.*?)\r?$", self.metadata, re.MULTILINE).group(1).decode()

    @property
    def system(self) -> str:
        glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", self.platform)
        if glibc:
            return f"Linux x86-64, glibc {glibc.group(1)}.{glibc.group(2)} or newer"
        names = {
            "any": "any system",
            "win_amd64": "Windows x86-64",
            "linux_x86_64": "Linux x86-64, glibc of the building machine or newer",
        }
        return names.get(self.platform, self.platform)

    @property
    def driver(self) -> str | None:
        """What the NVIDIA driver must be; None for a CPU-only wheel."""
        if not self.build_info.get("cuda"):
            return None
        return driver_needed(int(str(self.build_info["nvcc_version"]).split(".")[0]))

    @property
    def gpus(self) -> str | None:
        """Which GPUs it holds code for; None for a CPU-only wheel."""
        real, virtual = set(), set()
        for spelled in self.build_info["architectures"]:
            number, suffix, kind = re.fullmatch(r"(\d+)([af]?)-(real|virtual)", spelled).groups()
            (real if kind == "real" else virtual).add((int(number), suffix))
        if not real | virtual:
            return None
        named = []
        for number, suffix in sorted(real | virtual):
            capability = f"{number // 10}.{number % 10}"
            gpus = f" ({GPUS[capability]})" if capability in GPUS else ""
            named.append(f"{capability}{suffix}{gpus}")
        # PTX of the newest is compiled by the driver on any GPU after it.
        newest = max(number for number, _ in real | virtual)
        newer = " and newer" if (newest, "") in virtual else ""
        return ", ".join(named) + newer


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(path: Path, data: bytes) -> None:
    """Replaces a file in one step, and only if it changes, so that a copying tool sees what is new."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
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
        return {
            entry["filename"]: entry | {"sha256": entry["hashes"]["sha256"]}
            for entry in json.loads(record.read_bytes())["files"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise IndexRefused(
            f"{record} lists what is published and cannot be read ({type(error).__name__}: {error}): restore it from a "
            "backup, or make a new site of the wheels in an empty folder"
        ) from error


def check_published(site: Path, record: dict[str, dict]) -> Iterator[str]:
    """What was published is there, byte for byte."""
    cure = "restore that file; to withdraw a wheel, make a new site in an empty folder of the wheels that stay"
    for name, entry in record.items():
        path = site / FILES / name
        if not path.is_file():
            yield f"{path}: was published (sha256 {entry['sha256']}) and is gone: {cure}"
        elif sha256(path) != entry["sha256"]:
            yield f"{path}: was published with sha256 {entry['sha256']} and now has {sha256(path)}: {cure}"


def check_new(path: Path) -> list[str]:
    """A wheel that is to be published is verified, and has a label that can be a folder. Prints what could not be."""
    verdict = verify_to_publish(path)
    problems = verdict.problems
    for note in verdict.notes:
        print(f"note       {path.name}: {note}")
    if not problems and (label := read_wheel(path).version.local) in (FILES, EVERYTHING):
        problems = [f"its label {label!r} is a folder of every index: build it with another MAMBA_LOCAL_VERSION"]
    return [f"{path}: {problem}" for problem in problems]


def collect(wheels: Path, site: Path, record: dict[str, dict]) -> list[Path]:
    """The wheels to copy into the site. Raises IndexRefused with every reason there is."""
    problems, new = list(check_published(site, record)), []
    for path in sorted(wheels.glob("*.whl")):
        published = site / FILES / path.name
        if not published.exists():
            problems += check_new(path)
            new.append(path)
        elif sha256(published) != sha256(path):
            problems.append(
                f"{path}: {path.name} is published with other bytes (sha256 {sha256(published)}, this one has "
                f"{sha256(path)}). A published file never changes: give the new build another version or label"
            )
    # Left by a run that was cut off, or put there by hand.
    for path in sorted((site / FILES).glob("*.whl")):
        if path.name not in record:
            problems += check_new(path)
    if problems:
        raise IndexRefused("\n".join(problems))
    return new


def read_files(site: Path, record: dict[str, dict]) -> list[File]:
    """Every wheel of the site, newest version first."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    files = []
    for path in sorted((site / FILES).glob("*.whl")):
        wheel = read_wheel(path)
        files.append(
            File(
                project=wheel.project.replace("_", "-"),
                path=path,
                sha256=sha256(path),
                size=path.stat().st_size,
                uploaded=record.get(path.name, {}).get("upload-time", now),
                version=wheel.version,
                platform=wheel.tag.split("-")[-1],
                metadata=wheel.files[f"{wheel.dist_info}METADATA"],
                build_info={} if wheel.project == CONVOLUTION else wheel.build_info,
            )
        )
    return sorted(files, key=lambda file: file.version, reverse=True)


def requirements(files: list[File]) -> list[str]:
    """A line of requirements.txt for each version, with the hash of every file of it."""
    return [
        f"{files[0].project}=={version}"
        + "".join(f" \\\n    --hash=sha256:{file.sha256}" for file in files if file.version == version)
        for version in dict.fromkeys(file.version for file in files)
    ]


def project_json(project: str, files: Iterable[File]) -> dict:
    """PEP 691 with the fields of PEP 700."""
    entries = [
        {
            "filename": file.name,
            "url": f"../../{FILES}/{quote(file.name)}",
            "hashes": {"sha256": file.sha256},
            "requires-python": file.requires_python,
            "core-metadata": {"sha256": file.metadata_sha256},
            "size": file.size,
            "upload-time": file.uploaded,
        }
        for file in files
    ]
    versions = list(dict.fromkeys(str(file.version) for file in files))
    return {"meta": {"api-version": "1.1"}, "name": project, "versions": versions, "files": entries}


def root_json(projects: Iterable[str]) -> dict:
    return {"meta": {"api-version": "1.1"}, "projects": [{"name": project} for project in projects]}


def pages(files: list[File]) -> Iterator[tuple[str, bytes]]:
    """(path in the site, contents) of every page, in an order in which each only names what is there already."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "index_templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["url"] = quote
    convolutions = [file for file in files if file.project == CONVOLUTION_PROJECT]
    libraries = [file for file in files if file.project == PROJECT]
    # In pip's own order, the newest CUDA first.
    names = sorted({file.label for file in libraries}, key=lambda label: Version(f"0+{label}"), reverse=True)
    labels = {label: [file for file in libraries if file.label == label] for label in names}
    values = {"folder": FILES, "everything": EVERYTHING, "convolution": CONVOLUTION_PROJECT}
    for index, held in {EVERYTHING: libraries, **labels}.items():
        projects = {project: of for project, of in ((PROJECT, held), (CONVOLUTION_PROJECT, convolutions)) if of}
        folders = [
            (f"{index}/{project}", "project.html", project_json(project, of), {"project": project, "files": of})
            for project, of in projects.items()
        ]
        for folder, page, content, more in [*folders, (index, "root.html", root_json(projects), {})]:
            pins = requirements(more["files"]) if more else []
            page_values = {**values, **more, "index": index, "projects": projects, "pins": pins}
            yield f"{folder}/index.html", environment.get_template(page).render(page_values).encode()
            yield f"{folder}/index.json", (json.dumps(content, indent=1) + "\n").encode()
    values |= {"project": PROJECT, "labels": labels, "files": libraries, "convolutions": convolutions}
    yield "index.html", environment.get_template("overview.html").render(values).encode()


def make_index(wheels: Path, site: Path) -> list[str]:
    """Adds every wheel in the folder `wheels` to the index in the folder `site`; returns the names of those added.

    Raises IndexRefused, before anything is written, if a wheel is not fit or the site not what was published.
    """
    if not wheels.is_dir():
        raise IndexRefused(f"{wheels} is no folder of wheels")
    record = read_record(site)
    new = collect(wheels, site, record)
    if not new and not record and not any((site / FILES).glob("*.whl")):
        raise IndexRefused(f"{wheels} holds no wheel (*.whl) to make an index of")
    for path in new:
        write(site / FILES / path.name, path.read_bytes())
    files = read_files(site, record)
    for file in files:
        write(file.path.with_name(f"{file.name}.metadata"), file.metadata)
    for name, data in pages(files):
        write(site / name, data)
    return [path.name for path in new]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes a static package index of a folder of wheels, or adds to one.")
    parser.add_argument("wheels", type=Path, help="the folder with the wheels")
    parser.add_argument("site", type=Path, help="the folder of the index: new, empty, or made by this program before")
    options = parser.parse_args(words)
    try:
        read_record(options.site)  # a folder that is something else gets not even the lock
        options.site.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(options.site / ".lock", timeout=PATIENCE):
            added = make_index(options.wheels, options.site)
    except filelock.Timeout:
        print(
            f"another run is at work on {options.site} and did not end in {PATIENCE:.0f} s: try later", file=sys.stderr
        )
        return 1
    except IndexRefused as error:
        print(f"the index was not changed:\n{error}", file=sys.stderr)
        return 1
    except (Unreadable, OSError) as error:
        print(
            f"{error}\nThe index is whole, and may lack what was to be added: when the cause is gone, run this again",
            file=sys.stderr,
        )
        return 1
    for path in sorted(options.wheels.glob("*.tar.gz")):
        print(f"left out   {path.name}: pip would build an sdist wherever no wheel fits")
    for path in sorted(options.wheels.glob("*.whl")):
        print(f"{'added' if path.name in added else 'published'.ljust(9):10} {path.name}")
    print(f"{options.site}/index.html is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
