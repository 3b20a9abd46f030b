"""METADATA, WHEEL, build_info.json and the file name tell one story; Requires-Dist is what the code imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import lru_cache

from packaging.metadata import Metadata
from packaging.version import Version

from .wheel import BUILD_INFO, CONVOLUTION, MODULES, Wheel

EXTRAS = ("hub", "safetensors", "gguf", "onnx", "test", "plot", "publish", "release")
TAGS = {
    "mamba_ssm": ("py3-none-linux_x86_64", "py3-none-manylinux_2_28_x86_64", "py3-none-win_amd64"),
    CONVOLUTION: ("py3-none-any",),
}
FIELD = re.compile("[A-Z][A-Za-z]*(-[A-Za-z]+)*")
NAMES = {"mamba_ssm": "mamba_ssm", CONVOLUTION: "causal-conv1d"}


def check_names(wheel: Wheel) -> list[str]:
    """Name, version and tag of METADATA and WHEEL are those of the file name."""
    problems = []
    tags = TAGS[wheel.project]
    if wheel.tag not in tags:
        problems.append(f"its tag is {wheel.tag}; the project's wheels have one of {', '.join(tags)}")
    folders = {name.split("/")[0] for name in wheel.files if ".dist-info/" in name}
    if folders != {wheel.dist_info.rstrip("/")}:
        found = ", ".join(sorted(folders)) or "none"
        return [*problems, f"the file name asks for {wheel.dist_info} in the wheel, and there is: {found}"]

    headers(wheel.text(wheel.dist_info + "METADATA"))
    metadata = Metadata.from_email(wheel.text(wheel.dist_info + "METADATA"))
    if metadata.name != NAMES[wheel.project]:
        problems.append(f"METADATA: the name is {metadata.name!r}, not {NAMES[wheel.project]!r}")
    if metadata.version != wheel.version:
        problems.append(f"METADATA: the version is {metadata.version}, the file name's {wheel.version}")
    if str(metadata.requires_python) != ">=3.10":
        problems.append(f"METADATA: Requires-Python is {metadata.requires_python}, not >=3.10")

    fields, body = headers(wheel.text(wheel.dist_info + "WHEEL"))
    if body:
        problems.append("WHEEL: has a text behind its fields")
    pure = "true" if wheel.project == CONVOLUTION else "false"
    expected = {"Wheel-Version": ["1.0"], "Root-Is-Purelib": [pure], "Tag": [wheel.tag]}
    for field, values in expected.items():
        found = [value for name, value in fields if name.lower() == field.lower()]
        if found != values:
            problems.append(f"WHEEL: {field} is {', '.join(found) or 'missing'}, not {values[0]}")
    return problems


def headers(text: str) -> tuple[list[tuple[str, str]], str]:
    """(fields, body) of METADATA or WHEEL. Raises ValueError for a line that readers could take in two ways."""
    text = text.replace("\r\n", "\n")
    head, _, body = text.partition("\n\n")
    fields = []
    for line in head.removesuffix("\n").split("\n"):
        name, colon, value = line.partition(": ")
        if not colon or not FIELD.fullmatch(name) or not value.isprintable() or not value or value != value.strip():
            raise ValueError(f"{line[:80]!r} is no field: a name, a colon, a space and a text, on one line")
        fields.append((name, value))
    if "\r" in text or "\0" in text:
        raise ValueError("it holds a carriage return alone, or a zero byte")
    return fields, body


def check_build_info(wheel: Wheel) -> list[str]:
    """Version, label, CUDA and ABI of build_info.json are those of the file name and of the Python code."""
    info, problems = wheel.build_info, []
    package, label = str(info.get("package_version")), str(info.get("local_label"))
    if wheel.version.local is None:
        problems.append(
            "has no local label (such as +cu130), as wheels built from an sdist do: nobody could tell what it needs. "
            "Build it in a checkout: python setup.py bdist_wheel"
        )
    elif str(wheel.version) != str(Version(f"{package}+{label}")):
        problems.append(f"{BUILD_INFO}: says {package}+{label}, the file name {wheel.version}")
    cuda, nvcc = info.get("cuda"), str(info.get("nvcc_version"))
    named = re.match(r"cu(\d+)(?![a-z0-9])", label)
    if named and not cuda:
        problems.append(f"{BUILD_INFO}: the label is {label}, and the wheel was built without CUDA")
    elif named and named.group(1) != "".join(nvcc.split(".")[:2]):
        problems.append(f"{BUILD_INFO}: the label is {label}, and nvcc was {nvcc}")
    elif cuda and label == "cpu":
        problems.append(f"{BUILD_INFO}: the label is cpu, and the wheel was built with CUDA")
    if bool(cuda) != bool(info.get("architectures")):
        problems.append(f"{BUILD_INFO}: cuda is {cuda}, and the architectures are {info.get('architectures')}")
    if info.get("debug"):
        problems.append(f"{BUILD_INFO}: this is a debug build")

    for file, name, value in (
        ("mamba_ssm/version.py", "__version__", info.get("package_version")),
        ("mamba_ssm/_native/abi.py", "ABI_VERSION", info.get("abi_version")),
    ):
        found = assigned(wheel, file, name)
        if found != value:
            problems.append(f"{file}: {name} is {found!r}, and build_info.json says {value!r}")
    return problems


def check_requirements(wheel: Wheel) -> list[str]:
    """Requires-Dist: what is imported unguarded, always, and else what an extra of ours brings; no URLs.

    The packages of an extra are compared with the commit's: source.check_source.
    """
    metadata = Metadata.from_email(wheel.text(wheel.dist_info + "METADATA"))
    imported, unguarded = imports(wheel)
    problems, required = [], set()
    for requirement in metadata.requires_dist or []:
        module = re.sub(r"[-.]+", "_", requirement.name).lower()
        extra = re.fullmatch('extra == "([^"]*)"', str(requirement.marker or ""))
        if "triton" in module:
            reason = ": there is no triton in this project"
        elif requirement.url:
            reason = ": it names a URL, whatever lies there; ours name versions"
        elif extra and extra[1] not in EXTRAS:
            reason = f", and the project has no extra {extra[1]}; its extras are {', '.join(EXTRAS)}"
        elif requirement.marker and not extra:
            reason = ", under a condition; ours have none but an extra"
        elif not extra and module not in unguarded:
            reason = ", which every module of the wheel can do without"
        else:
            reason = ""
        if reason:
            problems.append(f"METADATA: Requires-Dist has {requirement}{reason}")
        if not extra:
            required.add(module)
    for module, places in sorted(unguarded.items()):
        if module not in required:
            problems.append(f"{places[0]}: imports {module}, which is not in Requires-Dist")
    problems += [f"{place}: imports triton" for place in imported.get("triton", [])]
    return problems


def check_convolution(wheel: Wheel) -> list[str]:
    """The other wheel's version names the mamba_ssm that it requires, and its modules import nothing else."""
    problems = []
    compatible, own = assigned(wheel, "causal_conv1d/__init__.py", "__version__"), wheel.version.local or ""
    if wheel.version.public != compatible or not own.startswith("mamba."):
        problems.append(f"its version is {wheel.version}, and should be {compatible}+mamba. and that of mamba_ssm")
    required = [str(line) for line in Metadata.from_email(wheel.text(wheel.dist_info + "METADATA")).requires_dist or []]
    expected = f"mamba_ssm=={own.removeprefix('mamba.')}"
    if required != [expected]:
        problems.append(f"METADATA: Requires-Dist has {', '.join(required) or 'nothing'}, not {expected}")
    for module, places in imports(wheel)[0].items():
        if module not in ("torch", CONVOLUTION):
            problems.append(f"{places[0]}: imports {module}, which mamba_ssm does not bring")
    return problems


def imports(wheel: Wheel) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """{module outside of the standard library: files that import it}, of all imports and of those made unguarded."""
    own = {"mamba_ssm", *MODULES}
    everything: dict[str, list[str]] = {}
    unguarded: dict[str, list[str]] = {}
    for name in sorted(wheel.files):
        if name.endswith(".py"):
            for found, modules in zip((everything, unguarded), _imports_of(wheel.files[name], name), strict=True):
                for module in modules:
                    if module not in own and module not in sys.stdlib_module_names:
                        found.setdefault(module.lower(), []).append(name)
    return everything, unguarded


@lru_cache(maxsize=1000)  # wheels of several labels have the same files, and this takes most of the time
def _imports_of(data: bytes, name: str) -> tuple[list[str], list[str]]:
    tree = ast.parse(data, name)
    return sorted(set(_modules(ast.walk(tree)))), sorted(set(_modules(iter(tree.body))))


def _modules(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def assigned(wheel: Wheel, file: str, name: str) -> object:
    """The literal that the module-level line `name = ...` of `file` assigns; of a dict, its keys."""
    for node in ast.parse(wheel.files[file], file).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            if isinstance(node.value, ast.Dict):
                return [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return ast.literal_eval(node.value)
    raise ValueError(f"{file} assigns no {name}")
