"""The wheel as read into memory, once, for all checks."""

from __future__ import annotations

import glob
import io
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

# Besides the package: CUDA modules' names of upstream and of VMamba.
MODULES = ("_mamba_ssm_finder", "selective_scan_cuda", "selective_scan_cuda_core", "selective_scan_cuda_oflex")
LIB = "mamba_ssm/lib/"
# The other distribution of this project, which is pure Python.
CONVOLUTION = "causal_conv1d"
BUILD_INFO = LIB + "build_info.json"
# What is read into memory at most: far above any wheel of ours, far below what could fill a machine's memory.
LARGEST = 1 << 30


class Unreadable(Exception):
    """The file is no wheel of ours that could be looked into; the text says why."""


@dataclass(frozen=True)
class Wheel:
    project: str  # mamba_ssm or causal_conv1d
    path: Path
    data: bytes = field(repr=False)  # of the file, read once: what is verified, and what to send
    version: Version  # of the file name
    tag: str  # of the file name, such as py3-none-win_amd64
    entries: list[zipfile.ZipInfo]
    files: dict[str, bytes] = field(repr=False)

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
    """Reads the file once, and every member of it, with its CRC checked. Raises Unreadable."""
    if not path.parent.is_dir():
        raise Unreadable(f"cannot be read: there is no folder {path.parent}")
    if not path.exists():
        what = "nothing there matches this pattern" if set(path.name) & set("*?[") else "there is no such file"
        raise Unreadable(f"cannot be read: {what}")
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
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            if size > LARGEST:
                raise Unreadable(f"its files would unpack to {size} bytes, more than any wheel of this project")
            files = {entry.filename: archive.read(entry) for entry in entries}
    except OSError as error:
        raise Unreadable(f"the file cannot be read: {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        raise Unreadable(f"the file is damaged, cut short or no zip archive: {error}") from None
    return Wheel(project, path, data, version, tag, entries, files)
