"""The device code inside a library: which architectures, as machine code or PTX.

NVIDIA publishes no description of this container. What stands here was read off the output of nvcc 13.0 and agrees with
cuobjdump's listing of it; tests/verify holds it to the nvcc that is there. A field that does not fit raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import zstandard

from . import limits

CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
# kind, version, size of this header, size of what follows, of it compressed code, ..., architecture (90), ..., flags,
# ..., size uncompressed
ENTRY = struct.Struct("<HHIQI8xI8xQ8xQ")
MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
ARCHITECTURE_SPECIFIC, FAMILY_SPECIFIC = 1 << 20, 1 << 21  # sm_90a, sm_100f
ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Entry:
    target: str  # as build_info.json spells it: 90-real, 120-virtual, 90a-real
    size: int  # of the code, uncompressed
    data: bytes = field(repr=False)  # as it is in the library
    compressed: bool

    def code(self) -> bytes:
        """Uncompressed, which takes `size` bytes; b"" where it is compressed in another way than zstd."""
        if not self.compressed:
            return self.data
        return zstandard.ZstdDecompressor().decompress(self.data, max_output_size=self.size) if zstd(self.data) else b""


def zstd(data: bytes) -> bool:
    return data.startswith(ZSTD)


def containers(section: bytes) -> list[list[Entry]]:
    """What the .nv_fatbin section of a library holds: one container for each source file.

    Nothing is uncompressed before it is known that all of it keeps to the limits.
    """
    found, at = [], 0
    while at < len(section):
        if section[at : at + 8] == bytes(len(section[at : at + 8])):
            at += 8  # the linker's filling between two files
            continue
        magic, version, header, size = CONTAINER.unpack_from(section, at)
        if magic != MAGIC or version != 1 or at + header + size > len(section):
            raise ValueError(f"what stands at byte {at} of the device code is no fat binary of a known kind")
        found.append(list(entries(section[at + header : at + header + size])))
        at += header + size
    sizes = [entry.size for container in found for entry in container]
    for size, most in ((sum(sizes), limits.DEVICE_CODE), (max(sizes, default=0), limits.DEVICE_CODE_OF_A_SOURCE)):
        if size > most:
            raise ValueError(f"it would unpack to {size} bytes, and may to {most}")
    return found


def entries(body: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(body):
        kind, _, header, size, packed, architecture, flags, full = ENTRY.unpack_from(body, at)
        if kind not in (PTX, MACHINE_CODE) or header < ENTRY.size or at + header + size > len(body):
            raise ValueError(f"byte {at} of a fat binary begins no PTX and no machine code (kind {kind})")
        suffix = "a" if flags & ARCHITECTURE_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
        data = body[at + header : at + header + (packed or size)]
        if packed and zstd(data) and zstandard.frame_content_size(data) not in (-1, full):
            raise ValueError(
                f"byte {at} of a fat binary: its code has another size than the {full} bytes that it tells"
            )
        target = f"{architecture}{suffix}-{'virtual' if kind == PTX else 'real'}"
        yield Entry(target, full if packed else size, data, bool(packed))
        at += header + size
