"""The zip archive: what builds write is read, and all that another reader could take in another way is refused."""

import bz2
import os
import struct
import sys
import zipfile
import zlib

import pytest
from _helpers.wheel_forge import BUILD_INFO, forge, info  # first: it may skip this module

# isort: split
from _helpers.zip_forge import deflated, members_of, write
from wheel_check import archive, limits, verify, verify_to_publish
from wheel_check.wheel import architectures_told

pytestmark = pytest.mark.slow
VERSION_PY = "mamba_ssm/version.py"


def unicode_path(name, other):
    """The extra field 0x7075: Python 3.13 and Info-ZIP take `other` for the member's name, if the CRC is of `name`."""
    data = struct.pack("<BL", 1, zlib.crc32(name.encode())) + other.encode()
    return struct.pack("<HH", 0x7075, len(data)) + data


SECOND_NAME = unicode_path(VERSION_PY, "evil.pth")
TIMES = struct.pack("<HHBL", 0x5455, 5, 1, 0)
ZIP64 = struct.pack("<HHQQ", 1, 16, 1, 1)
EVIL = b"import os  # no source of this project's\n"


def other(**fields):
    """{"central_flags": 1} -> {"central.flags": 1}: dots stand in no keyword."""
    return {name.replace("central_", "central.").replace("local_", "local."): value for name, value in fields.items()}


# What is changed of the member mamba_ssm/version.py -> the reason given. A function gets the member.
MEMBERS = {
    "a second name": (other(extra=SECOND_NAME), "version.py: length of the extra field 17; allowed: 0"),
    "a second name in the directory": (other(central_extra=SECOND_NAME), "length of the extra field 17"),
    "a second name before the data": (other(local_extra=SECOND_NAME), "says other things before the file"),
    "times in an extra field": (other(extra=TIMES), "length of the extra field 9"),
    "ZIP64": (other(extra=ZIP64), "length of the extra field 20"),
    "a comment": (other(comment=b"hello"), "length of the comment 5; allowed: 0"),
    "bzip2": (
        lambda member: {"method": 12, **stored_as(bz2.compress(member["data"]), member)},
        "compression method 12; allowed: 0 and 8",
    ),
    "deflate64": (other(method=9), "compression method 9"),
    "Zstandard": (other(method=93), "compression method 93"),
    "stored and deflated": (other(central_method=0), "says other things before the file"),
    "a name in UTF-8": (other(flags=0x800), "flags 2048"),
    "encrypted": (other(flags=1), "flags 1"),
    "a data descriptor": (
        lambda member: {"flags": 8, "behind": struct.pack("<4L", 0x08074B50, *sizes(member)), "local.crc": 0},
        "flags 8",
    ),
    "flags in one header": (other(local_flags=0x800), "says other things before the file"),
    "of DOS": (other(system=0), "writing system 0; allowed: 3"),
    "of a later version": (other(version=63), "writing version 63; allowed: 20"),
    "for a later version": (other(needed=45), "version needed 45; allowed: 20"),
    "of another disk": (other(disk=1), "disk 1"),
    "a text, whose line ends readers change": (other(internal=1), "internal attributes 1"),
    "a folder of DOS": (other(attributes=0o100644 << 16 | 0x10), "DOS attributes 16"),
    "no mode": (other(attributes=0), "mode 0o0; allowed: 0o100644"),
    "mode 000": (other(attributes=0o100000 << 16), "mode 0o100000"),
    "a program": (other(attributes=0o100755 << 16), "mode 0o100755"),
    "world-writable": (other(attributes=0o100666 << 16), "mode 0o100666"),
    "set-user-id": (other(attributes=0o104644 << 16), "mode 0o104644"),
    "a link": (other(attributes=0o120644 << 16), "mode 0o120644"),
    "no day": (other(date=0), "its time is none"),
    "second 62": (other(time=31), "its time is none"),
    "another time before the data": (other(local_time=1), "says other things before the file"),
    "another CRC before the data": (other(local_crc=1), "says other things before the file"),
    "another size before the data": (other(local_size=1), "says other things before the file"),
    "another name before the data": (other(local_name=b"mamba_ssm/versio_.py"), "says other things before the file"),
    "bytes behind the member": (other(behind=b"more"), "should begin here, and begins at byte"),
    "bytes behind the stream": (
        lambda member: deflated(member["data"], behind=b"more"),
        "bytes, compressed, and nothing else",
    ),
    "a second stream behind the first": (
        lambda member: deflated(member["data"], behind=deflated(EVIL)["payload"]),
        "bytes, compressed, and nothing else",
    ),
    "a stream without an end": (
        lambda member: stored_as(member["payload"][:-3], member),
        "bytes, compressed, and nothing else",
    ),
    "no stream": (lambda member: stored_as(b"\xff" * 20, member), "version.py: its data are damaged"),
    "a longer stream than told": (
        lambda member: {**deflated(member["data"] + EVIL), "size": len(member["data"]), "crc": member["crc"]},
        "bytes, compressed, and nothing else",
    ),
    "a shorter stream than told": (
        lambda member: {"size": member["size"] + 1},
        "bytes, compressed, and nothing else",
    ),
    "other data than the CRC's": (
        lambda member: {**deflated(bytes(member["size"])), "crc": member["crc"]},
        "its CRC is not the one in the archive",
    ),
    "the data of another member": (other(offset=0), "says other things before the file"),
}  # fmt: skip


def stored_as(payload, member):
    return {"payload": payload, "packed": len(payload), "size": member["size"], "crc": member["crc"]}


def sizes(member):
    return member["crc"], member["packed"], member["size"]


@pytest.fixture(scope="module")
def members(real_wheel):
    return members_of(real_wheel)


@pytest.fixture
def changed(members, real_wheel, tmp_path):
    """changed(fields) -> the wheel with these fields of version.py's headers."""

    def call(change):
        (number,) = (at for at, member in enumerate(members) if member["name"] == VERSION_PY.encode())
        member = members[number]
        new = {**member, **(change(member) if callable(change) else change)}
        return write([*members[:number], new, *members[number + 1 :]], tmp_path / real_wheel.name)

    return call


@pytest.mark.parametrize("case", MEMBERS)
def test_member_that_readers_take_differently(changed, case):
    change, reason = MEMBERS[case]
    (problem,) = verify(changed(change))
    assert reason in problem


# Around the members -> the reason given.
AROUND = {
    "bytes before": ({"before": b"#!/bin/sh\n"}, "_finder.py should begin here, and begins at byte 10"),
    "bytes before the directory": ({"between": b"between"}, "the directory of"),
    "bytes after": ({"after": b"\n"}, "bytes follow the archive's end, or a comment in it"),
    "a comment": ({"comment": b"hello"}, "bytes follow the archive's end, or a comment in it"),
    "an archive in the comment": ({"comment": b"PK\5\6" + bytes(18)}, "the directory should end"),
    "another order": ({"order": lambda entries: entries[::-1]}, "byte 0: "),
    "a member without an entry": ({"order": lambda found: found[:-1], "here": -1, "count": -1}, "the directory of"),
    "an entry beside the count": ({"here": -1, "count": -1}, "the directory of"),
    "a count too large": ({"here": 1, "count": 1}, "the directory should have a further file here"),
    "two counts": ({"here": -1}, "the archive's end tells of disks 0 and 0, and of"),
    "a second disk": ({"disk": 1}, "the archive's end tells of disks 1 and 0"),
    "a directory on a second disk": ({"first_disk": 1}, "the archive's end tells of disks 0 and 1"),
    "ZIP64's marks": ({"place": 0xFFFFFFFF}, "the directory should end"),
    "a shorter directory": ({"length": 46}, "the directory should end"),
}  # fmt: skip


@pytest.mark.parametrize("case", AROUND)
def test_archive_that_readers_take_differently(members, real_wheel, tmp_path, case):
    options, reason = AROUND[case]
    counts = {name: len(members) + options[name] for name in ("here", "count") if name in options}
    (problem,) = verify(write(members, tmp_path / real_wheel.name, **{**options, **counts}))
    assert reason in problem


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba_ssm/../../x.py", "could be written outside"),
        ("/etc/x.py", "could be written outside"),
        ("C:/x.py", "could be written outside"),
        ("mamba_ssm\\x.py", "could be written outside"),
        ("mamba_ssm/x.py\0.txt", "could be written outside"),
        ("mamba_ssm/x\n.py", "could be written outside"),
        ("mamba_ssm/./x.py", "could be written outside"),
        ("mamba_ssm//x.py", "could be written outside"),
        ("mamba_ssm/new/", "could be written outside"),
        ("mamba_ssm/x.py.", "could be written outside"),
        ("mamba_ssm/x.py ", "could be written outside"),
        ("mamba_ssm/ünew.py", "could be written outside"),
        ("", "could be written outside"),
        ("mamba_ssm/Version.py", "Version.py: is in the archive twice, as mamba_ssm/version.py too"),
        ("mamba_ssm/version.py", "version.py: is in the archive twice"),
        ("mamba_ssm/version.py/x.py", "mamba_ssm/version.py: is a file, and the folder of mamba_ssm/version.py/x.py"),
        ("mamba_ssm", "mamba_ssm: is a file, and the folder of"),
        ("mamba_ssm/nul.py", "is the name of a device on Windows"),
        ("mamba_ssm/COM1/x.py", "is the name of a device on Windows"),
        ("a/" * 32000 + "b", "the name has 64001 bytes, and may have 255"),
    ],
)
def test_name_that_systems_take_differently(members, real_wheel, tmp_path, name, reason):
    more = {**members[0], "name": name.encode(), **deflated(b"")}
    (problem,) = verify(write([*members, more], tmp_path / real_wheel.name))
    assert reason in problem


def test_what_builds_write_is_read(members, real_wheel, tmp_path):
    assert verify(write(members, tmp_path / real_wheel.name)) == []
    stored = [{**member, "method": 0, **stored_as(member["data"], member)} for member in members]
    small = [new if member["size"] < 1000 else member for member, new in zip(members, stored, strict=True)]
    assert verify(write(small, tmp_path / real_wheel.name)) == []


@pytest.mark.parametrize(("name", "number", "version"), [("LZMA", 14, 63), ("BZIP2", 12, 46)])
def test_method_that_not_every_reader_has(real_wheel, tmp_path, name, number, version):
    method = getattr(zipfile, f"ZIP_{name}")
    (problem,) = verify(forge(real_wheel, tmp_path, change=lambda entry: setattr(entry, "compress_type", method)))
    assert method == number and f"{version}; allowed: 20" in problem


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_decompression(monkeypatch):
    """For all but build_info.json, which decides how large libraries may be."""
    real = archive.content

    def content(data, member):
        assert member.name.endswith("build_info.json"), f"{member.name} was decompressed"
        return real(data, member)

    monkeypatch.setattr(archive, "content", content)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mamba_ssm/lib/libmamba_cpu.so", limits.LIBRARY),
        ("mamba_ssm/lib/libmamba_cuda.so", limits.LIBRARY),  # as build_info.json tells of no architecture
        ("mamba_ssm/new.py", limits.TEXT),
        ("mamba_ssm/data.bin", limits.TEXT),
    ],
)
def test_file_that_would_fill_the_memory(real_wheel, tmp_path, no_decompression, name, size):
    (problem,) = verify(forge(real_wheel, tmp_path, {name: bytes(size + 1)}))
    assert problem == f"{name}: would unpack to {size + 1} bytes, and such a file may have {size}"


@pytest.mark.parametrize(
    ("told", "count"),
    [
        ([], 0),
        (["90a-real", "120-virtual", "100f-real"], 3),
        (["90a-real", "90a-real"], 1),
        (["", "9-real", "90", "90-lto", "90x-real", "900a-real ", "1000-real", 90, None, ["90-real"]], 0),
        ([f"{number}-real" for number in range(10, 100)], 16),
        ("90-real", 0),
        ({"90-real": 1}, 0),
    ],
)
def test_only_architectures_add_to_a_limit(real_wheel, tmp_path, no_decompression, told, count):
    """Nor does build_info.json raise it without end: 1 GiB and 16 MiB are the most that a library may have."""
    assert limits.LIBRARY + 16 * limits.LIBRARY_OF_AN_ARCHITECTURE == (1 << 30) + (16 << 20)
    size, name = limits.LIBRARY + limits.LIBRARY_OF_AN_ARCHITECTURE * count, "mamba_ssm/lib/libmamba_cuda.so"
    with pytest.raises(archive.Unreadable, match=f"and such a file may have {size}$"):
        limits.check_libraries([archive.Member(name, 8, 0, 1, size + 1, 0)], count_of(real_wheel, tmp_path, told))


def count_of(wheel, folder, told):
    data = forge(wheel, folder, {BUILD_INFO: info(architectures=told)}).read_bytes()
    return architectures_told(data, archive.members(data))


def test_file_that_hides_its_size(changed):
    """A bomb whose headers promise little costs what they promise."""
    bomb = deflated(bytes(1 << 26)) | {"size": 100, "crc": zlib.crc32(bytes(100))}
    (problem,) = verify(changed(bomb))
    assert "are no 100 bytes, compressed, and nothing else" in problem


def test_too_many_files(real_wheel, tmp_path, no_decompression):
    many = {f"mamba_ssm/new{number}.py": b"" for number in range(archive.MOST_FILES)}
    assert f"and may hold {archive.MOST_FILES}" in verify(forge(real_wheel, tmp_path, many))[0]
    large = {f"mamba_ssm/new{number}.py": bytes(limits.TEXT) for number in range(limits.ALL_TEXTS // limits.TEXT)}
    assert "its files but the libraries would unpack to" in verify(forge(real_wheel, tmp_path, large))[0]


def test_file_that_is_larger_than_any_wheel(real_wheel, tmp_path, no_decompression):
    large = tmp_path / real_wheel.name
    with open(large, "wb") as file:
        file.truncate(1 << 40)
    assert "and no wheel of this project has so many" in verify(large)[0]
    incompressible = {"mamba_ssm/lib/libmamba_cpu.so": os.urandom(limits.WITHOUT_CUDA)}
    assert "with 0 architectures it may have 4" in verify(forge(real_wheel, tmp_path, incompressible))[0]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
def test_pipe_is_refused(real_wheel, tmp_path):
    os.mkfifo(tmp_path / real_wheel.name)
    assert verify(tmp_path / real_wheel.name) == ["cannot be read: it is no plain file"]


# ---- what callers send -----------------------------------------------------------------------------------------------


def test_verified_bytes_are_the_files(real_wheel, tmp_path):
    """The file is read once: what stands there afterwards is not what was verified, and nobody needs it any more."""
    made = forge(real_wheel, tmp_path)
    data = made.read_bytes()
    verdict = verify_to_publish(made)
    made.write_bytes(b"replaced")
    assert verdict.problems == [] and verdict.wheel.data == data
    assert verify_to_publish(made).wheel is None
