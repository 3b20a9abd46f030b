"""The zip archive, read by a list of what is allowed.

zipfile of one Python and of another, unzip, and uv's own reader differ in what they make of an unusual archive. So this
one takes what scripts/wheel_build/finish.py writes, which all of them read alike, and refuses everything else:

- The file is its members, end to end from byte 0, then the directory, which lists them in the same order, then the end
  record. Nothing is before, between or after them, and nothing is compressed behind a member's own data.
- A local header says what the directory says of the member: each field, and the name byte for byte.
- The fields have the values of ALLOWED: stored or deflated; no flag, so no data descriptor, no encryption, no name in
  UTF-8; no extra field, so no ZIP64 and no second name; no comment; one disk; a plain file of mode 644 from Unix.
- The end record counts the directory's entries rightly, on one disk, without a comment.
- A name is ASCII, relative, in plain parts, no device of Windows', and is there once however letters are cased; no
  file's name is another file's folder.
- There are at most MOST_FILES, and a name has at most LONGEST_NAME bytes.
- Sizes and CRC are those of the data. wheel.py bounds the sizes before anything is decompressed.
"""

from __future__ import annotations

import re
import stat
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

LOCAL, LOCAL_MARK = struct.Struct("<4s5H3L2H"), b"PK\3\4"
CENTRAL, CENTRAL_MARK = struct.Struct("<4s6H3L5H2L"), b"PK\1\2"
END, END_MARK = struct.Struct("<4s4H2LH"), b"PK\5\6"
LONGEST_COMMENT = 0xFFFF
MOST_FILES = 1000  # ours have some 200
LONGEST_NAME = 255  # bytes

STORED, DEFLATED, UNIX = 0, 8, 3
ALLOWED: dict[str, tuple[int, ...]] = {
    "writing system": (UNIX,),
    "writing version": (20,),
    "version needed": (20,),
    "flags": (0,),
    "compression method": (STORED, DEFLATED),
    "length of the extra field": (0,),
    "length of the comment": (0,),
    "disk": (0,),
    "internal attributes": (0,),
    "DOS attributes": (0,),
    "mode": (stat.S_IFREG | 0o644,),
}
PART = rb"\w(?:[\w.+-]*\w)?"
NAME = re.compile(rb"%s(?:/%s)*" % (PART, PART))  # of bytes: \w is ASCII
DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")  # a file of such a name is none on Windows


class Unreadable(Exception):
    """The file is no wheel of ours that could be looked into; the text says why."""


@dataclass(frozen=True)
class Member:
    name: str
    method: int
    crc: int
    packed: int  # bytes in the archive
    size: int  # bytes of the file
    start: int  # of its data in the archive


def members(data: bytes) -> list[Member]:
    """What the archive holds, nothing of it decompressed. Raises Unreadable."""
    count, place, end = _directory(data)
    found, at, expected = [], place, 0
    for _ in range(count):
        member, length, offset = _member(data, at, end)
        if offset != expected:
            raise Unreadable(f"byte {expected}: {member.name} should begin here, and begins at byte {offset}")
        at, expected = at + length, member.start + member.packed
        found.append(member)
    if at != end or expected != place:
        raise Unreadable(
            f"byte {expected}: the directory of {count} files should begin here and end at byte {end}, and is at bytes "
            f"{place} to {at}"
        )
    _check_names([member.name for member in found])
    return found


def _directory(data: bytes) -> tuple[int, int, int]:
    """(count of files, begin, end) as the end record has them."""
    end = len(data) - END.size
    if end < 0 or data[end : end + 4] != END_MARK:
        if data.rfind(END_MARK, max(0, end - LONGEST_COMMENT)) >= 0:
            raise Unreadable("bytes follow the archive's end, or a comment in it")
        raise Unreadable("the file is damaged, cut short or no zip archive: it does not end as one")
    _, disk, first_disk, here, count, size, place, comment = END.unpack_from(data, end)
    if (disk, first_disk, here) != (0, 0, count):
        raise Unreadable(
            f"the archive's end tells of disks {disk} and {first_disk}, and of {here} and {count} files; allowed are "
            "0 and 0, and the same count twice"
        )
    if count > MOST_FILES:
        raise Unreadable(f"holds {count} files, and may hold {MOST_FILES}")
    if place + size != end or comment:
        raise Unreadable(
            f"the directory should end at byte {end}, where the archive's end begins; it has {size} bytes from byte "
            f"{place}, and the comment behind it {comment}"
        )
    return count, place, end


def _member(data: bytes, at: int, end: int) -> tuple[Member, int, int]:
    """(the member whose entry of the directory is at byte `at`, length of the entry, offset of the local header)."""
    if at + CENTRAL.size > end or data[at : at + 4] != CENTRAL_MARK:
        raise Unreadable(f"byte {at}: the directory should have a further file here")
    _, made_by, needed, flags, method, time, date, crc, packed, size, length, extra, comment, disk, internal, *rest = (
        CENTRAL.unpack_from(data, at)
    )
    attributes, offset = rest
    raw = data[at + CENTRAL.size : at + CENTRAL.size + length]
    name = raw.decode("ascii", "backslashreplace")
    if length > LONGEST_NAME:
        raise Unreadable(f"{name[:LONGEST_NAME]}...: the name has {length} bytes, and may have {LONGEST_NAME}")
    if not NAME.fullmatch(raw):
        raise Unreadable(
            f"{name!r}: such a name could be written outside of the environment, or read in two ways; a part of a name "
            "begins and ends with an ASCII letter, a digit or _, between which . + - may stand"
        )
    found = (made_by >> 8, made_by & 0xFF, needed, flags, method, extra, comment, disk, internal, attributes & 0xFFFF)
    for (what, allowed), value in zip(ALLOWED.items(), (*found, attributes >> 16), strict=True):
        if value not in allowed:
            show = oct if what == "mode" else str
            raise Unreadable(f"{name}: {what} {show(value)}; allowed: {' and '.join(map(show, allowed))}")
    _check_moment(name, time, date)
    local = LOCAL.pack(LOCAL_MARK, needed, flags, method, time, date, crc, packed, size, length, 0) + raw
    if data[offset : offset + len(local)] != local:
        raise Unreadable(f"{name}: the archive says other things before the file than in its directory")
    start = offset + len(local)
    return Member(name, method, crc, packed, size, start), CENTRAL.size + length, offset


def _check_moment(name: str, time: int, date: int) -> None:
    try:
        datetime(1980 + (date >> 9), date >> 5 & 15, date & 31, time >> 11, time >> 5 & 63, (time & 31) * 2)
    except ValueError:
        raise Unreadable(f"{name}: its time is none: {date:#06x} {time:#06x}") from None


def _check_names(names: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if (key := name.lower()) in seen:
            also = seen[key]
            raise Unreadable(f"{name}: is in the archive twice" + (f", as {also} too" if also != name else ""))
        if any(DEVICE.fullmatch(part) for part in key.split("/")):
            raise Unreadable(f"{name}: is the name of a device on Windows")
        seen[key] = name
    for key, name in seen.items():
        parts = key.split("/")
        for depth in range(1, len(parts)):
            if (folder := "/".join(parts[:depth])) in seen:
                raise Unreadable(f"{seen[folder]}: is a file, and the folder of {name}")


def content(data: bytes, member: Member) -> bytes:
    """The member's bytes: exactly what its headers say. Raises Unreadable."""
    packed = data[member.start : member.start + member.packed]
    if member.method == STORED:
        found, whole = packed, True
    else:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # A byte more than there should be, so that a larger stream shows and costs no memory.
            found = inflater.decompress(packed, member.size + 1)
        except zlib.error as error:
            raise Unreadable(f"{member.name}: its data are damaged: {error}") from None
        whole = inflater.eof and not inflater.unused_data and not inflater.unconsumed_tail
    if not whole or len(found) != member.size:
        raise Unreadable(
            f"{member.name}: its {member.packed} bytes in the archive are no {member.size} bytes, compressed, and "
            "nothing else"
        )
    if zlib.crc32(found) != member.crc:
        raise Unreadable(f"{member.name}: its CRC is not the one in the archive: the file is damaged")
    return found
