"""The device code inside a library: which architectures, as machine code or PTX.

NVIDIA publishes no description of this container. What stands here was read off the output of nvcc 13.0 and agrees with
cuobjdump's listing of it; tests/verify holds it to the nvcc that is there. A field that does not fit raises ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

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
    data: bytes  # the code, uncompressed; b"" where it is compressed in another way than zstd


def containers(section: bytes) -> list[list[Entry]]:
    """What the .nv_fatbin section of a library holds: one container for each source file."""
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
    return found


def entries(body: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(body):
        kind, _, header, size, packed, architecture, flags, full = ENTRY.unpack_from(body, at)
        if kind not in (PTX, MACHINE_CODE) or header < ENTRY.size or at + header + size > len(body):
            raise ValueError(f"byte {at} of a fat binary begins no PTX and no machine code (kind {kind})")
        suffix = "a" if flags & ARCHITECTURE_SPECIFIC else "f" if flags & FAMILY_SPECIFIC else ""
        data = body[at + header : at + header + (packed or size)]
        if packed:
            zstd = data.startswith(ZSTD)
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=full) if zstd else b""
        yield Entry(f"{architecture}{suffix}-{'virtual' if kind == PTX else 'real'}", data)
        at += header + size
