"""How large a wheel and its files may be. All of it is checked before a byte is decompressed.

A file that decompresses to a gigabyte of zeros has a megabyte in the archive, and keeps every reader busy for minutes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .archive import Member, Unreadable

KIB, MIB = 1 << 10, 1 << 20
# Of the archive. With 9.0a alone, whose kernels are the most, it has 10.5 MB: all but a tenth is device code. Before
# 12.8, nvcc does not compress that: it has 41 MiB in the library, and 12 MiB deflated in the archive.
WITHOUT_CUDA = 4 * MIB
OF_AN_ARCHITECTURE = 24 * MIB
OF_CONVOLUTION = MIB // 8
MOST_ARCHITECTURES = 16  # that add to a limit
ARCHITECTURE = re.compile(r"[0-9]{2,3}[af]?-(real|virtual)")

# Of the files in it, decompressed. The largest module has 22 KB, the CPU library 2.5 MB (3.1 MB not optimised),
# all texts together 0.9 MB.
TEXT = 256 * KIB  # a module, a file of the metadata, build_info.json
ALL_TEXTS = 8 * MIB
SBOM = 16 * KIB  # ours have 1 to 4; the time that its schema takes is that of the square
LIBRARY = 16 * MIB
LIBRARY_OF_AN_ARCHITECTURE = 64 * MIB
# Of device code in a library, uncompressed: in all, and of one source for one architecture.
DEVICE_CODE = 1024 * MIB
DEVICE_CODE_OF_A_SOURCE = 64 * MIB


def count_architectures(told: object) -> int:
    """How many of these words of build_info.json are architectures, of those that add to a limit."""
    words = {word for word in told if isinstance(word, str)} if isinstance(told, list) else set()
    return min(sum(1 for word in words if ARCHITECTURE.fullmatch(word)), MOST_ARCHITECTURES)


def largest_archive(architectures: int, convolution: bool) -> int:
    return OF_CONVOLUTION if convolution else WITHOUT_CUDA + OF_AN_ARCHITECTURE * architectures


def check_archive(size: int, architectures: int, convolution: bool) -> None:
    """Raises Unreadable for a file that is larger than any wheel of ours for so many architectures."""
    budget = largest_archive(architectures, convolution)
    if size > budget:
        told = "" if convolution else f" with {architectures} architectures"
        raise Unreadable(f"the file has {size / MIB:.2f} MiB, and{told} it may have {budget / MIB:g}")


def is_library(name: str) -> bool:
    return name.startswith("mamba_ssm/lib/") and name.endswith((".so", ".dll"))


def check_texts(members: Sequence[Member]) -> None:
    """All but the libraries, whose limit build_info.json decides, and that is a text."""
    texts = [member for member in members if not is_library(member.name)]
    for member in texts:
        _check(member, TEXT)
    total = sum(member.size for member in texts)
    if total > ALL_TEXTS:
        raise Unreadable(f"its files but the libraries would unpack to {total} bytes, and may to {ALL_TEXTS}")


def check_libraries(members: Sequence[Member], architectures: int) -> None:
    """Each kind has one name on each system; contents.py refuses other names."""
    for member in members:
        if is_library(member.name):
            count = architectures if "mamba_cuda" in member.name else 0
            _check(member, LIBRARY + LIBRARY_OF_AN_ARCHITECTURE * count)


def _check(member: Member, limit: int) -> None:
    if member.size > limit:
        raise Unreadable(f"{member.name}: would unpack to {member.size} bytes, and such a file may have {limit}")
