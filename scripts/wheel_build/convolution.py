"""The second wheel: causal-conv1d, pure Python around mamba_ssm's convolution, for every system.

A wheel of such a package is its files and three texts in a zip archive. Written here, these bytes depend on the source
alone; and no build of it needs more than Python.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from . import build_info, finish, sbom, version

NAME, FOLDER = "causal_conv1d", "causal-conv1d"
TAG = "py3-none-any"
SBOM = f"{NAME}.cdx.json"
METADATA = """\
Metadata-Version: 2.4
Name: causal-conv1d
Version: {version}
Summary: causal-conv1d's functions on the kernels of mamba_ssm, for CUDA and CPU tensors
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: mamba_ssm=={mamba_ssm}
Description-Content-Type: text/markdown

{description}"""
WHEEL = f"Wheel-Version: 1.0\nGenerator: mamba_ssm\nRoot-Is-Purelib: true\nTag: {TAG}\n"


def source_files(root: Path) -> dict[str, Path]:
    """{name in the wheel: file}, sorted."""
    folder = root / FOLDER / "src"
    files = sorted(path for path in folder.rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    return {path.relative_to(folder).as_posix(): path for path in files}


def package_version(root: Path) -> str:
    """That of the package whose functions these are, and mamba_ssm's as a label: 1.7.0+mamba.2.4.0."""
    text = (root / FOLDER / "src" / NAME / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f'{NAME}/__init__.py holds no line __version__ = "..."')
    return f"{match[1]}+mamba.{version.base_version(root)}"


def wheel_name(root: Path) -> str:
    return f"{NAME}-{package_version(root)}-{TAG}.whl"


def build(root: Path, folder: Path, source_date: int | None) -> Path:
    """Writes the wheel into `folder` and returns its path. source_date: as SOURCE_DATE_EPOCH, None for the commit's."""
    number, source = package_version(root), build_info.source_of(root)
    description = (root / FOLDER / "README.md").read_text(encoding="utf-8")
    metadata = METADATA.format(version=number, mamba_ssm=version.base_version(root), description=description)
    texts = {
        "METADATA": metadata.encode(),
        "WHEEL": WHEEL.encode(),
        "top_level.txt": f"{NAME}\n{NAME}_cuda\n".encode(),
        "licenses/LICENSE": (root / "LICENSE").read_bytes(),
        f"{sbom.FOLDER}/{SBOM}": sbom.document("causal_conv1d", number, source.commit, source.changed).encode(),
    }
    files = {name: path.read_bytes() for name, path in source_files(root).items()}
    files |= {f"{NAME}-{number}.dist-info/{name}": data for name, data in texts.items()}
    record = f"{NAME}-{number}.dist-info/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    wheel = folder / wheel_name(root)
    finish.pack(files, wheel, source.seconds if source_date is None else source_date)
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
