"""Which files a wheel holds, how large it may be, and what its bill of materials says of them."""

from __future__ import annotations

import csv
import hashlib
import json
import re

from check_wheel_contents.checker import NO_CONFIG, WheelChecker
from check_wheel_contents.contents import WheelContents
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

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
# Of the file. With 9.0a alone, whose kernels are the most, it has 10.5 MB: all but a tenth is device code.
MIB = 1 << 20
BUDGET_WITHOUT_CUDA = 4 * MIB
BUDGET_OF_AN_ARCHITECTURE = 8 * MIB
BUDGET_OF_CONVOLUTION = MIB // 8


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
    contents.add_record_rows(csv.reader(wheel.text(f"{folder}/RECORD").splitlines()))
    contents.validate_tree()
    failed = checker.check_contents(contents)
    return [f"check-wheel-contents: {failure.show()}" for failure in failed]


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


def check_size(wheel: Wheel) -> list[str]:
    size = len(wheel.data)
    if wheel.project == CONVOLUTION:
        return [f"has {size} bytes, and may have {BUDGET_OF_CONVOLUTION}"] if size > BUDGET_OF_CONVOLUTION else []
    architectures = wheel.build_info.get("architectures") or []
    budget = BUDGET_WITHOUT_CUDA + BUDGET_OF_AN_ARCHITECTURE * len(architectures)
    if size > budget:
        return [f"has {size / MIB:.1f} MiB; with {len(architectures)} architectures it may have {budget / MIB:.0f}"]
    return []


def check_sbom(wheel: Wheel) -> list[str]:
    """The bill of materials is of this version, of these libraries' bytes, and names the CUDA runtime inside."""
    name = wheel.sbom
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
