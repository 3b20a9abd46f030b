"""Forgeries for tests/verify: a real wheel with some of its files exchanged, and small libraries made for the purpose.

zig compiles for Linux and for Windows, whatever this machine is.
"""

import base64
import csv
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NEEDED = "packaging check_wheel_contents elftools pefile zstandard cyclonedx jsonschema ziglang auditwheel"
for name in NEEDED.split():
    pytest.importorskip(name, reason=f'{name} is not installed here: pip install "WHEEL[publish,release]"')

import zstandard  # noqa: E402  (after the check for it)
from wheel_build import build_info, sbom  # noqa: E402
from wheel_check.libraries import bound_functions  # noqa: E402
from wheel_check.wheel import read_wheel  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = "mamba_ssm/lib/libmamba_cpu.so", "mamba_ssm/lib/libmamba_cuda.so"
CPU_DLL, CUDA_DLL = "mamba_ssm/lib/mamba_cpu.dll", "mamba_ssm/lib/mamba_cuda.dll"
BUILD_INFO = "mamba_ssm/lib/build_info.json"


def forge(wheel, folder, files=None, name=None, careful=True, change=None):
    """Writes a copy of `wheel` into `folder`, under `name` if given, and returns its path.

    files: {file: new bytes, a function of the old bytes, or None to leave it out}; "METADATA", "WHEEL", "RECORD",
        "top_level.txt" and "SBOM" stand for their paths.
    careful: brings the libraries in build_info.json, the bill of materials and RECORD up to date, where `files` does
        not speak of them.
    change: a function of each ZipInfo.
    """
    files, target = files or {}, folder / (name or wheel.name)
    new = "-".join(target.name.split("-")[:2]) + ".dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        old = next(entry.split("/")[0] + "/" for entry in archive.namelist() if ".dist-info/" in entry)
        members = {entry.replace(old, new): archive.read(entry) for entry in archive.namelist()}
    places = {word: new + word for word in ("METADATA", "WHEEL", "RECORD", "top_level.txt")} | {
        "SBOM": f"{new}sboms/mamba_ssm.cdx.json"
    }

    def put(file, content):
        if content is None:
            del members[file]
        else:
            members[file] = content(members[file]) if callable(content) else content

    for file, content in files.items():
        if file not in ("SBOM", "RECORD"):
            put(places.get(file, file), content)
    if careful and any(file.endswith((".so", ".dll")) for file in files):
        members[BUILD_INFO] = build_info_of(members)
    if careful:
        members[places["SBOM"]] = sbom_of(members, members[places["SBOM"]], new.split("-")[1].removesuffix(".dist"))
    if "SBOM" in files:
        put(places["SBOM"], files["SBOM"])
    if careful:
        members[places["RECORD"]] = record_of(members, places["RECORD"])
    if "RECORD" in files:
        put(places["RECORD"], files["RECORD"])
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in members.items():
            entry = zipfile.ZipInfo(file)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            if change:
                change(entry)
            archive.writestr(entry, content)
    return target


def info(**facts):
    """Changes fields of build_info.json, and writes it as the build does."""
    return lambda old: build_info.text({**json.loads(old), **facts}).encode()


def build_info_of(members):
    files = sorted(file for file in members if file.endswith((".so", ".dll")))
    return info(libraries={file.split("/")[-1]: build_info.recorded(members[file]) for file in files})(
        members[BUILD_INFO]
    )


def sbom_of(members, old, version):
    """As the build writes it; the old one where build_info.json is no more what the build reads."""
    try:
        return sbom.text(json.loads(members[BUILD_INFO]), version).encode()
    except (KeyError, TypeError, AttributeError):
        return old


def record_of(members, record):
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for file, content in members.items():
        if file != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow([file, f"sha256={digest}", len(content)])
    rows.writerow([record, "", ""])
    return text.getvalue().encode()


class Libraries:
    """Compiles small libraries that export what the Python code of `wheel` calls, and need no C library."""

    def __init__(self, wheel, folder):
        self.functions, self.folder, self.count = bound_functions(read_wheel(wheel)), folder, 0

    def make(self, code="", *flags, windows=False, leave_out=(), section=b""):
        """The bytes of a library. `section`: its device code."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        lines = ["#define API " + ("__declspec(dllexport)" if windows else "")]
        lines += [f"API int {name}(void) {{ return 0; }}" for name in self.functions if name not in leave_out]
        if windows:
            lines.append("int DllMainCRTStartup(void* a, unsigned b, void* c) { return 1; }")
        if section:
            place, numbers = ".nv_fatb" if windows else ".nv_fatbin", ",".join(map(str, section))
            lines.append(f'__attribute__((section("{place}"), used, aligned(8)))')
            lines.append(f"static const unsigned char device[] = {{{numbers}}};")
        (folder / "library.c").write_text("\n".join([*lines, code, ""]))
        if not windows:
            flags = (f"-Wl,--version-script={ROOT / 'csrc' / 'exports.map'}", *flags)
        return link(folder, "library.c", *flags, windows=windows).read_bytes()


def link(folder, *words, output="library", windows=False):
    target = "x86_64-windows-gnu" if windows else "x86_64-linux-gnu.2.28"
    zig("cc", "-target", target, "-shared", "-nostdlib", "-s", "-o", output, *words, folder=folder)
    return folder / output


def zig(*words, folder):
    cache = str(folder / "cache")
    environ = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    command = [sys.executable, "-m", "ziglang", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FLAGS = {"": 0, "a": 1 << 20, "f": 1 << 21}


def fat_binary(*targets, code=b"code", compressed=True):
    """One container as nvcc writes it, for targets such as 90-real, 120-virtual, 100f-real."""
    body = b""
    for target in targets:
        architecture, _, kind = target.partition("-")
        suffix = architecture.lstrip("0123456789")
        data = zstandard.compress(code) if compressed else code
        padded = data + bytes(-len(data) % 8)
        body += struct.pack(
            "<HHIQI8xI8xQ8xQ",
            {"real": 2, "virtual": 1}.get(kind, 8),
            0x101,
            64,
            len(padded),
            len(data) if compressed else 0,
            int(architecture.removesuffix(suffix)),
            FLAGS[suffix] | 0x11,
            len(code) if compressed else 0,
        )
        body += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
