"""A published wheel, and what the pages say of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from packaging.version import Version
from wheel_build.advice import driver_needed
from wheel_check.wheel import CONVOLUTION, Wheel

PROJECT, CONVOLUTION_PROJECT = PROJECTS = "mamba-ssm", CONVOLUTION.replace("_", "-")
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


@dataclass(frozen=True)
class File:
    """One wheel of the index: what was verified or, of a published one, what has the hash that was published."""

    project: str
    name: str
    sha256: str
    size: int
    uploaded: str  # ISO 8601 in UTC
    version: Version
    platform: str  # of the wheel's tag
    metadata: bytes
    build_info: dict  # {} of a wheel without libraries
    data: bytes | None = field(repr=False)  # to write; None if it is published already
    yanked: str = ""  # why, "" if it is not

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


def file_of(wheel: Wheel, uploaded: str, new: bool) -> File:
    """Everything comes from the bytes that `wheel` was read from."""
    return File(
        project=wheel.project.replace("_", "-"),
        name=wheel.path.name,
        sha256=hashlib.sha256(wheel.data).hexdigest(),
        size=len(wheel.data),
        uploaded=uploaded,
        version=wheel.version,
        platform=wheel.tag.split("-")[-1],
        metadata=wheel.files[f"{wheel.dist_info}METADATA"],
        build_info={} if wheel.project == CONVOLUTION else wheel.build_info,
        data=wheel.data if new else None,
    )
