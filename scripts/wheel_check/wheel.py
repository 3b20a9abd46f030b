"""The wheel as read into memory, once, for all checks."""

from __future__ import annotations

import glob
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from . import archive, limits
from .archive import Unreadable

# Besides the package: the doctor's own door, and CUDA modules' names of upstream, VMamba and Spatial-Mamba.
MODULES = (
    "_mamba_ssm_finder",
    "mamba_ssm_doctor",
    "selective_scan_cuda",
    "selective_scan_cuda_core",
    "selective_scan_cuda_oflex",
    "selective_scan_cuda_oflex_rh",
)
LIB = "mamba_ssm/lib/"
# The other distribution of this project, which is pure Python.
CONVOLUTION = "causal_conv1d"
BUILD_INFO = LIB + "build_info.json"


@dataclass(frozen=True)
class Wheel:
    project: str  # mamba_ssm or causal_conv1d
    path: Path
    data: bytes = field(repr=False)  # of the file, read once: what is verified, and what to send
    version: Version  # of the file name
    tag: str  # of the file name, such as py3-none-win_amd64
    files: dict[str, bytes] = field(repr=False)  # in the archive's order

    @property
    def dist_info(self) -> str:
        return f"{self.project}-{self.version}.dist-info/"

    @property
    def windows(self) -> bool:
        return self.tag.endswith("-win_amd64")

    def text(self, name: str) -> str:
        """Raises KeyError if the wheel has no such file, UnicodeDecodeError if it is no text."""
        return self.files[name].decode("utf-8")

    @cached_property
    def build_info(self) -> dict:
        info = json.loads(self.text(BUILD_INFO))
        if not isinstance(info, dict):
            raise ValueError(f"{BUILD_INFO} holds no JSON object")
        return info

    @cached_property
    def source(self) -> tuple[object, bool]:
        """(commit, whether files differ from it), of build_info.json; where there is none, of the bill of materials."""
        if self.project != CONVOLUTION:
            return self.build_info.get("source_commit"), bool(self.build_info.get("source_dirty"))
        (told,) = json.loads(self.text(self.sbom))["metadata"]["component"]["properties"]
        commit, _, changed = told["value"].partition(" ")
        return None if commit == "unknown" else commit, bool(changed)

    @property
    def sbom(self) -> str:
        return f"{self.dist_info}sboms/{self.project}.cdx.json"

    @cached_property
    def libraries(self) -> list[str]:
        """The files that build_info.json promises."""
        if self.project == CONVOLUTION:
            return []
        names = ["mamba_cpu", "mamba_cuda"] if self.build_info.get("cuda") else ["mamba_cpu"]
        return [LIB + (f"{name}.dll" if self.windows else f"lib{name}.so") for name in names]


def find_wheels(words: list[str]) -> list[Path]:
    """The files that a command line names: cmd and PowerShell hand on *.whl as it is."""
    return [Path(name) for word in words for name in sorted(glob.glob(word)) or [word]]


def read_wheel(path: Path) -> Wheel:
    """Reads the file once, and every member of it, in bounds of size. Raises Unreadable."""
    check_there(path)
    project, version, tag = names_in(path)
    data = read_file(path, limits.largest_archive(limits.MOST_ARCHITECTURES, project == CONVOLUTION))
    members = archive.members(data)
    limits.check_texts(members)
    count = architectures_told(data, members)
    limits.check_archive(len(data), count, project == CONVOLUTION)
    limits.check_libraries(members, count)
    return Wheel(project, path, data, version, tag, {member.name: archive.content(data, member) for member in members})


def check_there(path: Path) -> None:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # said below
    except (OSError, ValueError) as error:  # such as a name that is too long, or has a NUL
        raise Unreadable(f"cannot be read: {error}") from None
    if not path.parent.is_dir():
        raise Unreadable(f"cannot be read: there is no folder {path.parent}")
    if not path.exists():
        what = "nothing there matches this pattern" if set(path.name) & set("*?[") else "there is no such file"
        raise Unreadable(f"cannot be read: {what}")
    if not path.is_file():
        raise Unreadable("cannot be read: it is no plain file")  # a pipe would wait for ever


def names_in(path: Path) -> tuple[str, Version, str]:
    """(project, version, tag) of the file name."""
    try:
        name, version, build, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise Unreadable(f"the file name is no wheel's: {error}") from None
    project = name.replace("-", "_")
    if project not in ("mamba_ssm", CONVOLUTION):
        raise Unreadable(f"the file name says that this is {name}, not mamba_ssm")
    tag = ".".join(sorted(str(tag) for tag in tags))
    expected = f"{project}-{version}-{tag}.whl"
    if build or len(tags) != 1 or path.name != expected:
        raise Unreadable(f"the file name is not spelt as the project's builds spell it: {expected}")
    return project, version, tag


def read_file(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error}") from None
    if len(data) > limit:
        raise Unreadable(f"has more than {limit} bytes, and no wheel of this project has so many")
    return data


def architectures_told(data: bytes, members: list[archive.Member]) -> int:
    """How many build_info.json tells of; 0 where it tells nothing that makes sense, which others will say."""
    for member in members:
        if member.name == BUILD_INFO:
            try:
                return limits.count_architectures(json.loads(archive.content(data, member))["architectures"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return 0
    return 0
