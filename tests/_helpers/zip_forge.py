"""Archives that zipfile would not write: a wheel's members with any field of any header changed."""

import struct
import zipfile
import zlib
from pathlib import Path

# Field -> its kind; the name, the extra field and the comment, whose lengths stand in the header, follow it.
LOCAL = {"needed": "H", "flags": "H", "method": "H", "time": "H", "date": "H", "crc": "L", "packed": "L", "size": "L"}
CENTRAL = {"version": "B", "system": "B", **LOCAL}
BEHIND = {"disk": "H", "internal": "H", "attributes": "L", "offset": "L"}
END = {"disk": "H", "first_disk": "H", "here": "H", "count": "H", "length": "L", "place": "L"}


def members_of(wheel):
    """[{field: value}], with the compressed bytes as `payload`."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            data = archive.read(entry)
            member = {
                "system": 3,
                "version": 20,
                "needed": 20,
                "flags": 0,
                "method": 8,
                "time": 0,
                "date": 33,
                "extra": b"",
                "comment": b"",
                "disk": 0,
                "internal": 0,
                "attributes": 0o100644 << 16,
                "name": entry.filename.encode(),
                "behind": b"",
                "data": data,
            }
            found.append(member | deflated(data))
    return found


def deflated(data, behind=b""):
    """Fields of a member: its data, compressed, and bytes behind the stream that its packed size takes in."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    payload = compressor.compress(data) + compressor.flush() + behind
    return {"payload": payload, "packed": len(payload), "size": len(data), "crc": zlib.crc32(data)}


def write(members, target, before=b"", between=b"", after=b"", order=None, **end):
    """Writes the archive. Fields named central.X and local.X stand in one header alone, X in both.

    before, between, after: bytes beside the members and the directory. order: a function of the directory's entries.
    end: fields of the end record, and its `comment`.
    """
    body, directory = bytearray(before), []
    for member in members:
        local = {key: member.get(f"local.{key}", value) for key, value in member.items()}
        central = {key: member.get(f"central.{key}", value) for key, value in member.items()}
        central.setdefault("offset", len(body))
        lengths = struct.pack("<3H", *(len(central[key]) for key in ("name", "extra", "comment")))
        entry = b"PK\1\2" + pack(CENTRAL, central) + lengths + pack(BEHIND, central)
        directory.append(entry + central["name"] + central["extra"] + central["comment"])
        body += b"PK\3\4" + pack(LOCAL, local) + struct.pack("<2H", len(local["name"]), len(local["extra"]))
        body += local["name"] + local["extra"] + member["payload"] + member["behind"]
    body += between
    entries = b"".join(order(directory) if order else directory)
    comment, count = end.pop("comment", b""), len(directory)
    record = {"disk": 0, "first_disk": 0, "here": count, "count": count, "length": len(entries), "place": len(body)}
    last = b"PK\5\6" + pack(END, {**record, **end}) + struct.pack("<H", len(comment)) + comment
    Path(target).write_bytes(bytes(body) + entries + last + after)
    return target


def pack(kinds, fields):
    return struct.pack("<" + "".join(kinds.values()), *(fields[name] for name in kinds))
