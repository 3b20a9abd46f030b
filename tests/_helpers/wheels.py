"""Wheels for these tests: one of this source tree with its CPU library, and changed copies of it."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

from wheel_build import convolution, sbom
from wheel_build.build_info import Source, abi_version, recorded
from wheel_build.build_info import text as build_info_text
from wheel_build.version import base_version

ROOT = Path(__file__).resolve().parents[2]
BUILD_INFO = "mamba_ssm/lib/build_info.json"
LIBRARY = "mamba_ssm/lib/libmamba_cpu.so"
WHEEL = b"Wheel-Version: 1.0\nGenerator: setuptools (77.0.1)\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n\n"


def package_files(root):
    """{name in the wheel: file} of what a build copies: the package, and compat's modules beside it."""
    package = [*(root / "mamba_ssm").rglob("*.py"), root / "mamba_ssm" / "py.typed"]
    files = {path.relative_to(root).as_posix(): path for path in package}
    return files | {path.name: path for path in (root / "compat").glob("*.py")}


def assemble(folder):
    """The CPU-only wheel of this source tree, around the library that it holds built: seconds, no compiler."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAMBA")}
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**environ, "MAMBA_SSM_CUDA": "off"}, check=True)
    (metadata,) = folder.glob("*.dist-info/METADATA")
    version = base_version(ROOT)
    info = {
        "package_version": version,
        "local_label": "cpu",
        "cuda": False,
        "nvcc_version": None,
        "host_compiler": "GNU 12.2.0",
        "cross_built": None,
        "glibc": None,
        "linker": None,
        "architectures": [],
        "dtypes": ["float32", "float16", "bfloat16"],
        "flags": {"cxx": "-O3 -DNDEBUG"},
        "debug": False,
        "abi_version": abi_version(ROOT),
        "libraries": {Path(LIBRARY).name: recorded((ROOT / LIBRARY).read_bytes())},
        "source_commit": None,  # the tree as it is, and with other texts
        "source_dirty": False,
    }
    contents = {name: path.read_bytes() for name, path in package_files(ROOT).items()}
    dist_info = f"mamba_ssm-{version}+cpu.dist-info"
    contents |= {
        LIBRARY: (ROOT / LIBRARY).read_bytes(),
        BUILD_INFO: build_info_text(info).encode(),
        f"{dist_info}/METADATA": metadata.read_bytes(),
        f"{dist_info}/WHEEL": WHEEL,
        f"{dist_info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{dist_info}/sboms/{sbom.NAME}": sbom.text(info, f"{version}+cpu").encode(),
        f"{dist_info}/top_level.txt": "".join(
            f"{name}\n" for name in sorted({*(path.stem for path in (ROOT / "compat").glob("*.py")), "mamba_ssm"})
        ).encode(),
    }
    return write(folder / f"mamba_ssm-{version}+cpu-py3-none-linux_x86_64.whl", contents)


def assemble_convolution(folder):
    """The wheel of causal-conv1d, of this tree as it is: it names no commit."""
    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch("wheel_build.build_info.source_of", lambda root: Source()):
        return convolution.build(ROOT, folder, 0)


def repack(wheel, folder, *, version=None, label=None, platform=None, build_info=None, **files):
    """Writes a changed copy of the wheel to `folder` and returns its path.

    `version`, `label` and `platform` are changed wherever they stand, `build_info` are fields of it to change. `files`
    are METADATA or a module's name without .py, and text to add at its end.
    """
    was = re.fullmatch(r"mamba_ssm-([^-+]+)\+([^-]+)-py3-none-(\w+)\.whl", wheel.name)
    version, label, platform = version or was[1], label or was[2], platform or was[3]
    dist_info = f"mamba_ssm-{version}+{label}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        contents = {
            name.replace(f"mamba_ssm-{was[1]}+{was[2]}.dist-info", dist_info): archive.read(name)
            for name in archive.namelist()
            if not name.endswith("/RECORD")
        }
    metadata, tags, module = f"{dist_info}/METADATA", f"{dist_info}/WHEEL", "mamba_ssm/version.py"
    named = f"Version: {was[1]}+{was[2]}\n".encode()
    contents[metadata] = contents[metadata].replace(named, f"Version: {version}+{label}\n".encode(), 1)
    contents[tags] = contents[tags].replace(was[3].encode(), platform.encode())
    contents[module] = contents[module].replace(f'"{was[1]}"'.encode(), f'"{version}"'.encode())
    info = {**json.loads(contents[BUILD_INFO]), "package_version": version, "local_label": label, **(build_info or {})}
    contents[BUILD_INFO] = build_info_text(info).encode()
    contents[f"{dist_info}/sboms/{sbom.NAME}"] = sbom.text(info, f"{version}+{label}").encode()
    for name, text in files.items():
        contents[metadata if name == "METADATA" else f"mamba_ssm/{name}.py"] += text.encode()
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder / f"mamba_ssm-{version}+{label}-py3-none-{platform}.whl", contents)


def plain(folder, project, version, *requires):
    """A wheel of another project, empty but for its metadata: what a public index might offer."""
    dist_info = f"{project}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {version}"]
    for requirement in requires:
        lines += [f"Provides-Extra: {extra}" for extra in re.findall(r'extra == "(\w+)"', requirement)]
        lines.append(f"Requires-Dist: {requirement}")
    contents = {
        f"{dist_info}/METADATA": "".join(f"{line}\n" for line in lines).encode(),
        f"{dist_info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder / f"{project}-{version}-py3-none-any.whl", contents)


def write(path, contents):
    (record,) = {f"{name.split('/')[0]}/RECORD" for name in contents if name.endswith(".dist-info/METADATA")}
    lines = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in contents.items()]
    contents = {**contents, record: "".join([*lines, f"{record},,\n"]).encode()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return path


def _digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
