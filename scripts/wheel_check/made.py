"""Texts of the wheel that are not what the build makes of its commit: refused with --strict, noted without it.

METADATA is compared field by field. The fields are the standard's (PEP 621); which version of setuptools wrote them
decides their order, Metadata-Version and Dynamic alone. The bill of materials and all of causal-conv1d's METADATA are
this project's own writing, and are written again and compared whole.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from packaging.specifiers import SpecifierSet
from wheel_build import build_info, convolution, sbom

from . import source
from .metadata import headers
from .wheel import BUILD_INFO, CONVOLUTION, Wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # check-wheel-contents brings it

# What writes METADATA and decides these.
OF_THE_WRITER = {"Metadata-Version": re.compile(r"2\.\d"), "Dynamic": re.compile("license-file")}
GENERATORS = {"mamba_ssm": re.compile(r"setuptools \(\d+(\.\d+)*\)"), CONVOLUTION: re.compile("mamba_ssm")}
CONTENT_TYPES = {".md": "text/markdown", ".rst": "text/x-rst", ".txt": "text/plain"}
SHOWN = 60  # characters of a value in a message


def check_made(wheel: Wheel) -> list[str]:
    checks: list[Callable[[Wheel], Iterator[str]]] = [check_generator]
    if wheel.project != CONVOLUTION:
        checks.append(check_build_info)
    if (commit := source.known_commit(wheel)) is not None:
        own = check_metadata if wheel.project != CONVOLUTION else check_convolution
        checks += [partial(own, commit=commit), partial(check_sbom, commit=commit)]
    found: list[str] = []
    for check in checks:
        try:
            found += check(wheel)
        # As in the other checks: whatever stands in these texts, the verdict names it.
        except Exception as error:
            found.append(f"METADATA, WHEEL, build_info.json or SBOM cannot be read: {type(error).__name__}: {error}")
    return found


def check_generator(wheel: Wheel) -> Iterator[str]:
    """WHEEL has the build's four fields and no other: of what a Build or an unknown one means, readers decide."""
    fields, _ = headers(wheel.text(wheel.dist_info + "WHEEL"))
    written_by = [value for name, value in fields if name == "Generator"]
    if len(written_by) != 1 or not GENERATORS[wheel.project].fullmatch(written_by[0]):
        yield f"WHEEL: Generator is {', '.join(written_by) or 'missing'}, and no build of this project writes that"
    for name, value in fields:
        if name not in ("Wheel-Version", "Generator", "Root-Is-Purelib", "Tag"):
            yield f"WHEEL: has {name}: {short(value)}, which no build of this project writes"


# ---- METADATA --------------------------------------------------------------------------------------------------------


def check_metadata(wheel: Wheel, commit: str) -> Iterator[str]:
    fields, body = headers(wheel.text(wheel.dist_info + "METADATA"))
    found = {}
    for name, value in fields:
        found.setdefault(name, []).append(value)
    expected, description = metadata_of(commit)
    expected["Version"] = [str(wheel.version)]
    for name in sorted({*found, *expected}):
        if name in OF_THE_WRITER:
            bad = [value for value in found[name] if not OF_THE_WRITER[name].fullmatch(value)]
            if bad or len(found[name]) > 1:
                yield f"METADATA: {name} is {short(', '.join(found[name]))}, and no build of this project writes that"
        elif name not in ("Requires-Dist", "Provides-Extra"):  # which source.check_source refuses in any case
            told, promised = found.get(name, []), expected.get(name, [])
            if sorted(map(plain, told)) != sorted(map(plain, promised)):
                yield f"METADATA: {name} is {values(told)}, and commit {commit} makes {values(promised)}"
    if body.rstrip("\n") != description.rstrip("\n"):
        yield f"METADATA: the description is not the readme of commit {commit}"


def metadata_of(commit: str) -> tuple[dict[str, list[str]], str]:
    """(fields, description) of a commit's pyproject.toml (PEP 621). Raises ValueError for what ours never said."""
    project = tomllib.loads(shown(commit, "pyproject.toml"))["project"]
    fields = {
        "Name": [project.pop("name")],
        "Summary": [project.pop("description", "")],
        "License-Expression": [project.pop("license", "")],
        "License-File": project.pop("license-files", []),
        "Keywords": [",".join(project.pop("keywords", []))],
        "Classifier": project.pop("classifiers", []),
        "Requires-Python": [project.pop("requires-python", "")],
        "Project-URL": [f"{label}, {url}" for label, url in project.pop("urls", {}).items()],
    }
    for key, name in (("authors", "Author"), ("maintainers", "Maintainer")):
        people = project.pop(key, [])
        fields[name] = [", ".join(one["name"] for one in people if "email" not in one)]
        mails = [
            f"{one['name']} <{one['email']}>" if "name" in one else one["email"] for one in people if "email" in one
        ]
        fields[f"{name}-email"] = [", ".join(mails)]
    readme = project.pop("readme")
    fields["Description-Content-Type"] = [CONTENT_TYPES[Path(readme).suffix]]
    if project.pop("dynamic") != ["version"] or set(project) - {"dependencies", "optional-dependencies"}:
        raise ValueError(f"pyproject.toml of commit {commit} says what wheel_check/made.py does not know: {project}")
    filled = {name: [value for value in told if value] for name, told in fields.items()}
    return {name: told for name, told in filled.items() if told}, shown(commit, readme)


def check_convolution(wheel: Wheel, commit: str) -> Iterator[str]:
    """causal-conv1d's METADATA and WHEEL are written by convolution.py, from a text in it and the readme."""
    if not written_here(commit, convolution.__file__):
        yield not_compared("METADATA", commit, "convolution.py")
        return
    own = str(wheel.version.local).removeprefix("mamba.")
    readme = shown(commit, "causal-conv1d/README.md")
    expected = convolution.METADATA.format(version=wheel.version, mamba_ssm=own, description=readme)
    if wheel.text(wheel.dist_info + "METADATA") != expected:
        yield f"METADATA: is not what commit {commit} makes"


# ---- the bill of materials -------------------------------------------------------------------------------------------


def check_sbom(wheel: Wheel, commit: str) -> Iterator[str]:
    if not written_here(commit, sbom.__file__):
        yield not_compared(wheel.sbom, commit, "sbom.py")
        return
    if wheel.project == CONVOLUTION:
        expected = sbom.document("causal_conv1d", str(wheel.version), commit, False)
    else:
        expected = sbom.text(wheel.build_info, str(wheel.version))
    if (found := wheel.text(wheel.sbom)) != expected:
        where = ", ".join(list(differences(json.loads(found), json.loads(expected)))[:4]) or "order or white space"
        yield f"{wheel.sbom}: is not what the build makes of commit {commit} and build_info.json: {where}"


def differences(found: object, expected: object, where: str = "") -> Iterator[str]:
    """The places in two JSON documents where they differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in dict.fromkeys([*expected, *found]):
            yield from differences(found.get(key), expected.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif found != expected or type(found) is not type(expected):
        yield where


# ---- build_info.json -------------------------------------------------------------------------------------------------


def check_build_info(wheel: Wheel) -> Iterator[str]:
    """Its fields are those that the build writes, and fit the tag and each other.

    host_compiler, flags, linker and cross_built tell how the libraries were built, which nothing else in a wheel does.
    """
    info, allowed = wheel.build_info, fields_of_build_info(wheel)
    if wheel.text(BUILD_INFO) != build_info.text(info) or list(info) != list(allowed):
        strange = ", ".join(map(short, sorted(set(info) ^ set(allowed)))) or "their order, white space, or a name twice"
        yield f"{BUILD_INFO}: its fields are not spelt as the build spells them: {strange}"
    for name in set(info) & set(allowed):
        if not re.fullmatch(allowed[name], json.dumps(info[name])):
            value = short(json.dumps(info[name]))
            yield f"{BUILD_INFO}: {name} is {value}, which no build of this project writes into such a wheel"
    targets = [re.fullmatch(r"(\d+)([af]?)-(\w+)", str(word)) for word in info.get("architectures") or []]
    order = [(int(target[1]), target[2], target[3]) for target in targets if target]
    if order != sorted(set(order)):
        yield f"{BUILD_INFO}: architectures are not in the build's order, or there twice"


def fields_of_build_info(wheel: Wheel) -> dict[str, str]:
    """{field: pattern of its JSON}, in the build's order: wheel_build/build_info.py."""
    cuda, release = wheel.build_info.get("cuda") is True, "manylinux" in wheel.tag
    text = r'"(?:[^"\\]|\\.){0,400}"'
    cross = (
        rf'\{{"on": {text}, "mamba_cuda": {text}, "mamba_cpu": {text}, "mingw_w64": {text}, "run_on_windows": false\}}'
    )
    return {
        "package_version": r'"[\w.]+"',
        "local_label": r'"[\w.-]+"',
        "cuda": "true|false",
        "nvcc_version": r'"\d+\.\d+\.\d+"' if cuda else "null",
        "host_compiler": r'"[A-Za-z]+ \d[\w.]*"',
        "cross_built": f"null|{cross}" if wheel.windows and cuda else "null",
        "glibc": r'"2\.28"' if release else "null",
        "linker": r'"zig \d[\w.+-]*"' if release else "null",
        "architectures": r'\["\d{2,3}[af]?-(real|virtual)"(, "\d{2,3}[af]?-(real|virtual)")*\]' if cuda else r"\[\]",
        "dtypes": r'\["float32"(, "float16")?(, "bfloat16")?\]',
        "flags": rf'\{{"cxx": {text}, "cuda": {text}\}}' if cuda else rf'\{{"cxx": {text}\}}',
        "debug": "false",
        "abi_version": r"\d+",
        "libraries": r"\{.*\}",  # contents.py compares them
        "source_commit": r'null|"[0-9a-f]{40}([0-9a-f]{24})?"',
        "source_dirty": "false",
    }


# ---- of a commit -----------------------------------------------------------------------------------------------------


def shown(commit: str, path: str) -> str:
    """A text file of a commit. Raises ValueError where it has none."""
    data = source.git("show", f"{commit}:{path}")
    if data is None:
        raise ValueError(f"commit {commit} has no {path}")
    return data.decode("utf-8").replace("\r\n", "\n")


def written_here(commit: str, file: str) -> bool:
    """Whether a script of the builder is the same in the commit as here, where it runs."""
    path = Path(file)
    return source.git("show", f"{commit}:scripts/wheel_build/{path.name}") == path.read_bytes().replace(b"\r\n", b"\n")


def not_compared(name: str, commit: str, script: str) -> str:
    return (
        f"{name}: could not be compared: commit {commit} writes it with another scripts/wheel_build/{script} than this "
        "checkout's; verify the wheel in a checkout of that commit"
    )


def plain(value: str) -> str:
    """A specifier in one spelling, anything else as it is."""
    return str(SpecifierSet(value)) if value.startswith((">", "<", "=", "~", "!")) else value


def values(told: list[str]) -> str:
    return short(", ".join(told)) if told else "missing"


def short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
