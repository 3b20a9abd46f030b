"""Nothing of the machine that built the wheel: no folder of it, no name of a compiler's temporary file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from . import fatbin
from .libraries import read_dll, read_elf
from .wheel import Wheel

ROOT = Path(__file__).resolve().parents[2]
# Each begins with plain characters and looks back afterwards: so re skips bytes ten times as fast, and there are many.
# Folders that builds happen in; the package's own texts may speak of /usr or C:\src.
BUILD_FOLDERS = (
    re.compile(rb"/(?<![\w./:-]/)(?:home|root|Users|work|workspace|builds?|__w|github)/[\w.+-]{2,}"),
    re.compile(rb":[\\/](?<=[A-Z]:[\\/])Users[\\/]\w+"),
)
# A library has reason to name the kernel's folders (/proc, /sys, /dev) and no other.
ANY_FOLDER = (
    re.compile(
        rb"/(?<![\w./-]/)(?:bin|build|builds|c|data|github|home|media|mnt|nix|opt|private|root|scratch|src|srv|tmp|usr|var"
        rb"|work|workspace|Users|__w)/[\w.+-]{2,}"
    ),
    re.compile(rb":\\(?<=[A-Za-z]:\\)(?<!\w[A-Za-z]:\\)(?:[\w .+()-]{2,}\\){1,30}[\w.+-]{2,}"),
)
TEMPORARY = (
    re.compile(rb"tmpxft_[0-9a-f]{8}"),
    re.compile(rb"\.cudafe1\."),
    re.compile(rb"cc(?<!\wcc)[A-Za-z0-9]{6}\.(?:[so]|cpp|cu)\b"),
)


def check_leaks(wheel: Wheel) -> list[str]:
    own = [
        folder.encode() for path in (ROOT, Path.home()) for folder in (str(path), path.as_posix()) if len(folder) > 5
    ]
    problems = []
    for name, data in wheel.files.items():
        library = name in wheel.libraries
        found = set()
        for text in texts(wheel, data) if library else [data]:
            for pattern in (*(ANY_FOLDER if library else BUILD_FOLDERS), *TEMPORARY):
                # With the letter of the drive before the colon.
                starts = ((match, match.start() - match.group().startswith(b":")) for match in pattern.finditer(text))
                found |= {text[start : match.end()] for match, start in starts}
            found |= {folder for folder in own if folder in text}
        problems += [f"{name}: holds {leak.decode()!r}, of the machine that built it" for leak in sorted(found)]
    return problems


def texts(wheel: Wheel, data: bytes) -> Iterator[bytes]:
    """A library's bytes, its device code uncompressed."""
    section = (read_dll if wheel.windows else read_elf)(data).device_code
    # Compressed bytes are as good as random, and would name a folder once in a while.
    yield data.replace(section, b"") if section else data
    for container in fatbin.containers(section):
        yield from (entry.code() for entry in container)
