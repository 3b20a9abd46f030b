"""The zip archive and its RECORD: layout, names, modes, sizes and hashes."""

from __future__ import annotations

import base64
import csv
import hashlib
import stat
import struct
from collections import Counter
from pathlib import PurePosixPath

from .wheel import Wheel

# The last record of an archive: its mark, four counts, size and place of the directory, length of a comment.
END, END_MARK = struct.Struct("<4s4H2LH"), b"PK\5\6"


def check_layout(wheel: Wheel) -> list[str]:
    """The archive is its files, end to end, then their directory. Installers disagree on what anything else means."""
    at, whole = 0, len(wheel.data)
    for entry in sorted(wheel.entries, key=lambda entry: entry.header_offset):
        if entry.header_offset != at:
            return [f"byte {at}: {entry.filename} should begin here, and begins at byte {entry.header_offset}"]
        header = entry.FileHeader()
        if wheel.data[at : at + len(header)] != header:
            return [f"{entry.filename}: the archive says other things before the file than in its directory"]
        at += len(header) + entry.compress_size
    mark, *_, size, place, comment = END.unpack_from(wheel.data, whole - END.size)
    if mark != END_MARK or comment:
        return ["bytes follow the archive's end, or a comment in it"]
    if (place, place + size + END.size) != (at, whole):
        return [f"byte {at}: the directory should begin here and fill the file, and has {size} bytes from byte {place}"]
    return []


def check_members(wheel: Wheel) -> list[str]:
    """Plain files with safe names, each once, writable by their owner alone or by a group."""
    problems = []
    for name, count in Counter(entry.filename for entry in wheel.entries).items():
        if count > 1:
            problems.append(f"{name}: is in the archive {count} times")
    for entry in wheel.entries:
        name, mode = entry.filename, entry.external_attr >> 16
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            problems.append(f"{name!r}: such a name could be written outside of the environment")
        if entry.is_dir() or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
            problems.append(f"{name}: is no plain file")
        if mode & stat.S_IWOTH:
            problems.append(f"{name}: is world-writable (mode {stat.S_IMODE(mode):o})")
        if mode & (stat.S_ISUID | stat.S_ISGID):
            problems.append(f"{name}: is set-user-id or set-group-id (mode {stat.S_IMODE(mode):o})")
    return problems


def check_record(wheel: Wheel) -> list[str]:
    """RECORD names every file once, with its sha256 and size."""
    record = wheel.dist_info + "RECORD"
    if record not in wheel.files:
        return [f"{record}: missing"]
    problems, seen = [], set()
    for row in csv.reader(wheel.text(record).splitlines()):
        if len(row) != 3:
            problems.append(f"{record}: this line has not three fields: {','.join(row)!r}")
            continue
        name, digest, size = row
        if name in seen:
            problems.append(f"{record}: names {name} twice")
        seen.add(name)
        if name == record:
            if digest or size:
                problems.append(f"{record}: has a hash of itself")
        elif name not in wheel.files:
            problems.append(f"{record}: names {name}, which is not in the wheel")
        else:
            data = wheel.files[name]
            hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if digest != f"sha256={hashed}":
                problems.append(f"{name}: its hash is not the one in RECORD: the file was changed after the build")
            if size != str(len(data)):
                problems.append(f"{name}: has {len(data)} bytes, and RECORD says {size!r}")
    problems += [f"{name}: is not in RECORD" for name in wheel.files if name not in seen]
    return problems
