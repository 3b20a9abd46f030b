"""The software bill of materials inside a wheel (PEP 770): what is in the libraries besides this project's own code.

CycloneDX 1.6, written by hand: the document is small, the builder needs no package for it, and with no time and no
random number in it the same build gives the same bytes. Which other wheels it requires is in METADATA.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from urllib.parse import quote

FOLDER, NAME = "sboms", "mamba_ssm.cdx.json"


def text(info: dict, version: str) -> str:
    """`info`: build_info.json, with the libraries' hashes. `version`: the wheel's, with its label."""
    parts = [_file(name, recorded["sha256"]) for name, recorded in info["libraries"].items()] + _inside(info)
    return document("mamba_ssm", version, info["source_commit"], info["source_dirty"], parts, _tools(info))


def document(
    name: str, version: str, commit: str | None, changed: bool, parts: Sequence[dict] = (), tools: Sequence[dict] = ()
) -> str:
    """`name`: the distribution's. `commit`: its source's, `changed`: whether files differ from that."""
    source = (commit or "unknown") + (" with changes" if changed else "")
    purl = f"pkg:pypi/{name.replace('_', '-')}@{quote(version, safe='')}"
    content = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": tools},
            "component": {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": purl,
                "properties": [{"name": "source:commit", "value": source}],
            },
        },
        "components": parts,
        "dependencies": [{"ref": purl, "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    content["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content)).urn
    return json.dumps(content, indent=2) + "\n"


def _file(library: str, digest: str) -> dict:
    name = f"mamba_ssm/lib/{library}"
    return {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _inside(info: dict) -> list[dict]:
    """Other people's code that is linked into the libraries."""
    found = []
    if info["cuda"]:
        toolkit = ".".join(info["nvcc_version"].split(".")[:2])
        found.append(_library("NVIDIA Corporation", "cudart_static", toolkit, "NVIDIA CUDA Toolkit EULA"))
    compiler, _, compiler_version = info["host_compiler"].partition(" ")
    if compiler == "MSVC":
        terms = "Microsoft Visual Studio License Terms, distributable code"
        found.append(_library("Microsoft Corporation", "libcmt", compiler_version, terms))
    if cross := info.get("cross_built"):
        terms = "GPL-3.0-or-later WITH GCC-exception-3.1"
        found.append(_library("Free Software Foundation", "libstdc++", cross["mamba_cpu"].partition(" ")[2], terms))
        found.append(_library("mingw-w64 project", "winpthreads", cross["mingw_w64"], "MIT AND BSD-3-Clause"))
    return found


def _library(supplier: str, name: str, version: str, terms: str) -> dict:
    return {
        "type": "library",
        "bom-ref": f"{name}@{version}",
        "supplier": {"name": supplier},
        "name": name,
        "version": version,
        "licenses": [{"license": {"name": terms}}],
    }


def _tools(info: dict) -> list[dict]:
    named = [info["host_compiler"], f"nvcc {info['nvcc_version']}" if info["cuda"] else "", info["linker"] or ""]
    named.append((info.get("cross_built") or {}).get("mamba_cpu", ""))
    pairs = [tool.partition(" ") for tool in named if tool]
    return [{"type": "application", "name": name, "version": version} for name, _, version in pairs]
