"""Which files a wheel holds, and what RECORD, build_info.json and its bill of materials say of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from check_wheel_contents.checker import NO_CONFIG, WheelChecker
from check_wheel_contents.contents import WheelContents
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from . import limits
from .wheel import BUILD_INFO, CONVOLUTION, LIB, MODULES, Wheel

MODULE = re.compile(r"mamba_ssm/(\w+/)*\w+\.py")
TYPED = "mamba_ssm/py.typed"  # type checkers read the hints of a package that has it
SBOM_SCHEMA = JsonStrictValidator(SchemaVersion.V1_6)
REQUIRED = ("METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE")
# Of the other wheel.
CONVOLUTION_FILES = (
    "causal_conv1d/__init__.py",
    "causal_conv1d/causal_conv1d_interface.py",
    "causal_conv1d/causal_conv1d_varlen.py",
    "causal_conv1d/cpp_functions.py",
    "causal_conv1d_cuda.py",
)


def check_contents(wheel: Wheel) -> list[str]:
    """The package's modules, the libraries of build_info.json, the metadata; no other file."""
    expected = {BUILD_INFO, TYPED, wheel.sbom, *wheel.libraries, *(wheel.dist_info + name for name in REQUIRED)}
    expected |= {f"{module}.py" for module in MODULES}
    problems = [f"{name}: missing" for name in sorted(expected - set(wheel.files))]
    for name in sorted(set(wheel.files) - expected):
        if not MODULE.fullmatch(name) or name.startswith(LIB):
            problems.append(f"{name}: is no file of this project's wheels")
    return problems + _check_wheel_contents(wheel, ["mamba_ssm", *(f"{module}.py" for module in MODULES)])


def check_convolution(wheel: Wheel) -> list[str]:
    """The other wheel's modules and metadata, and no other file."""
    expected = {*CONVOLUTION_FILES, wheel.sbom, *(wheel.dist_info + name for name in REQUIRED)}
    problems = [f"{name}: missing" for name in sorted(expected - set(wheel.files))]
    problems += [f"{name}: is no file of this project's wheels" for name in sorted(set(wheel.files) - expected)]
    return problems + _check_wheel_contents(wheel, ["causal_conv1d", "causal_conv1d_cuda.py"])


def _check_wheel_contents(wheel: Wheel, toplevel: list[str]) -> list[str]:
    checker = WheelChecker()
    checker.configure_options(configpath=NO_CONFIG, toplevel=toplevel)
    folder = wheel.dist_info.rstrip("/")
    contents = WheelContents(folder, f"{folder.removesuffix('.dist-info')}.data", wheel.project == CONVOLUTION)
    contents.add_record_rows(rows_of(wheel))
    contents.validate_tree()
    failed = checker.check_contents(contents)
    return [f"check-wheel-contents: {' '.join(failure.show().split())}" for failure in failed]


def check_fixed(wheel: Wheel) -> list[str]:
    """Files that are neither of the source nor told of elsewhere have the bytes that the build gives them."""
    own = (CONVOLUTION, f"{CONVOLUTION}_cuda") if wheel.project == CONVOLUTION else ("mamba_ssm", *MODULES)
    fixed = {wheel.dist_info + "top_level.txt": "".join(f"{name}\n" for name in sorted(own)), TYPED: ""}
    return [
        f"{name}: holds {wheel.files[name][:200]!r}, and the build writes {text!r}"
        for name, text in fixed.items()
        if wheel.files.get(name, text.encode()) != text.encode()
    ]


def rows_of(wheel: Wheel) -> list[list[str]]:
    """RECORD's lines. No name needs quotes, so that every reader of tables finds the same fields."""
    return [line.split(",") for line in wheel.text(wheel.dist_info + "RECORD").removesuffix("\n").split("\n")]


def check_record(wheel: Wheel) -> list[str]:
    """RECORD names every file once, with its sha256 and size."""
    record = wheel.dist_info + "RECORD"
    if record not in wheel.files:
        return [f"{record}: missing"]
    problems, seen = [], set()
    for row in rows_of(wheel):
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
            problems.append(f"{record}: names {name!r}, which is not in the wheel")
        else:
            data = wheel.files[name]
            hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if digest != f"sha256={hashed}":
                problems.append(f"{name}: its hash is not the one in RECORD: the file was changed after the build")
            if size != str(len(data)):
                problems.append(f"{name}: has {len(data)} bytes, and RECORD says {size!r}")
    problems += [f"{name}: is not in RECORD" for name in wheel.files if name not in seen]
    return problems


def check_recorded_libraries(wheel: Wheel) -> list[str]:
    """build_info.json tells size and hash of each library as it is in the wheel: the loader takes no other file."""
    recorded = wheel.build_info.get("libraries")
    found = {
        name.removeprefix(LIB): {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in wheel.files.items()
        if name in wheel.libraries
    }
    if recorded == found:
        return []
    told = recorded if isinstance(recorded, dict) else {}
    names = sorted(name for name in {*told, *found} if told.get(name) != found.get(name))
    return [f"{BUILD_INFO}: does not tell size and sha256 of {name} as it is in the wheel" for name in names]


def check_sbom(wheel: Wheel) -> list[str]:
    """The bill of materials is of this version, of these libraries' bytes, and names the CUDA runtime inside."""
    name = wheel.sbom
    if (size := len(wheel.files[name])) > limits.SBOM:
        return [f"{name}: has {size} bytes, and may have {limits.SBOM}"]
    wrong = SBOM_SCHEMA.validate_str(wheel.text(name))
    if wrong:
        return [f"{name}: is no CycloneDX 1.6 document: {wrong.data.message}"]
    document = json.loads(wheel.text(name))
    version = document["metadata"]["component"]["version"]
    problems = [] if version == str(wheel.version) else [f"{name}: is of version {version}"]
    hashes = {part["name"]: part["hashes"][0]["content"] for part in document["components"] if part["type"] == "file"}
    for library in sorted({*wheel.libraries, *hashes}):
        if hashes.get(library) != hashlib.sha256(wheel.files.get(library, b"")).hexdigest():
            problems.append(f"{name}: does not tell of {library} as it is in the wheel")
    if wheel.project == CONVOLUTION:
        return problems
    names = {part["name"] for part in document["components"]}
    if bool(wheel.build_info.get("cuda")) != ("cudart_static" in names):
        problems.append(f"{name}: lists {', '.join(sorted(names))}, and cuda is {wheel.build_info.get('cuda')}")
    return problems
