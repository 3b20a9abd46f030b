"""Finds and loads the two kernel libraries, each on first use, and checks that they match this package.

mamba_cuda is loaded by the first CUDA tensor, so that importing works on a machine without a driver. A library that
cannot be loaded raises NativeError with what was tried and what to do; nothing is replaced by a slow path in silence.
This module does not import torch before a CUDA tensor comes: the doctor loads libraries where there is no torch.
"""

import ctypes
import hashlib
import json
import sys
import threading
import typing
from pathlib import Path

from mamba_ssm._native import abi, signatures
from mamba_ssm._native.errors import NativeError, architecture_problem, driver_problem, shell_command

LIBRARY_FOLDER = Path(__file__).resolve().parent.parent / "lib"

_lock = threading.RLock()
# What is loaded already; launch.py looks here on every call before it asks for more.
libraries: dict[str, signatures.Functions] = {}  # by kind
ready_cuda_devices: dict[int, signatures.Functions] = {}  # mamba_cuda's, by device index
_build_info: dict[str, typing.Any] | None = None
_REINSTALL = "Reinstall mamba_ssm: pip install --force-reinstall --no-deps with the wheel's file."


def library_path(kind: str) -> Path:
    """Where the library of kind "cpu" or "cuda" lies if this installation has it."""
    name = f"mamba_{kind}.dll" if sys.platform == "win32" else f"libmamba_{kind}.so"
    return LIBRARY_FOLDER / name


def build_info() -> dict[str, typing.Any]:
    """What lib/build_info.json says about the build, {} if there is none. Read once, at first use."""
    global _build_info
    if _build_info is None:
        path = LIBRARY_FOLDER / "build_info.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            _check_build_info(found)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise NativeError(f"mamba_ssm: {path} cannot be read: {error}. {_REINSTALL}") from error
        _build_info = found
    return _build_info


def _check_build_info(info: object) -> None:
    """Raises ValueError where the parts that are looked into are not of their kind."""
    if not isinstance(info, dict):
        raise ValueError(f"it holds {json.dumps(info)[:40]}, which is no JSON object")
    architectures, libraries = info.get("architectures", []), info.get("libraries", {})
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"architectures is {json.dumps(architectures)[:40]}, which is no list of names")
    entries = libraries.values() if isinstance(libraries, dict) else [None]
    if not all(isinstance(entry, dict) and {"size", "sha256"} <= entry.keys() for entry in entries):
        raise ValueError(f"libraries is {json.dumps(libraries)[:40]}, which tells no size and sha256 of each library")


def damage(kind: str) -> str | None:
    """How a library's file differs from what build_info.json records of it, None if it does not.

    The system opens a file that was cut off, and ends Python (SIGBUS) where a page of it is missing; it runs one with
    other bytes. So size and hash are compared before a library is opened. That reads the file once in each process,
    which takes milliseconds (docs/architecture.md) where a cache would have to be kept, locked and trusted.
    """
    path = library_path(kind)
    recorded = build_info().get("libraries", {}).get(path.name)
    if recorded is None:
        return None
    size = path.stat().st_size
    if size != recorded["size"]:
        what = f"it has {size} bytes, and {recorded['size']} are recorded"
    elif (digest := _sha256(path)) != recorded["sha256"]:
        what = f"its SHA-256 is {digest}, and {recorded['sha256']} is recorded"
    else:
        return None
    return f"mamba_ssm: {path} is damaged or was changed: {what} in build_info.json beside it. {_REINSTALL}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def load(kind: str) -> signatures.Functions:
    """The bound functions of a library, {name: ctypes function}; loads and checks it at the first call."""
    functions = libraries.get(kind)
    if functions is None:
        with _lock:
            functions = libraries.get(kind)
            if functions is None:
                functions = _open(kind)
                libraries[kind] = functions
    return functions


def loaded(kind: str) -> bool:
    """Whether the library was loaded already."""
    return kind in libraries


def info(kind: str) -> abi.MambaLibraryInfo:
    """MambaLibraryInfo of a library (loads it)."""
    return _query_info(load(kind), library_path(kind))


def cuda_functions(index: int) -> signatures.Functions:
    """mamba_cuda's functions for this CUDA device, after driver and architecture were checked once."""
    functions = ready_cuda_devices.get(index)
    if functions is None:
        with _lock:
            functions = load("cuda")
            problem = cuda_problem(index)
            if problem:
                raise NativeError(f"mamba_ssm cannot run on cuda:{index}: {problem}")
            ready_cuda_devices[index] = functions
    return functions


def cuda_problem(index: int) -> str | None:
    """Why mamba_cuda cannot run on this CUDA device, or None (loads mamba_cuda)."""
    facts = info("cuda")
    problem = driver_problem(facts.cuda_driver_version, facts.cuda_runtime_version)
    if problem is None:
        architectures = build_info().get("architectures") or []
        if architectures:
            import torch

            problem = architecture_problem(torch.cuda.get_device_capability(index), architectures)
    return problem


def missing_message(kind: str, path: Path) -> str:
    """What to say when there is no such library file."""
    if not library_path("cpu").exists():
        return (
            f"mamba_ssm: {path} does not exist, nor does any other kernel library: this is a source tree, or an "
            "incomplete installation. Build a wheel (python setup.py bdist_wheel) and pip install the file in dist, or "
            "pip install -e . for development."
        )
    label = build_info().get("local_label") or "cpu"
    build = shell_command("python setup.py bdist_wheel", MAMBA_SSM_CUDA="on")
    return (
        f"mamba_ssm got a CUDA tensor, but this installation holds CPU kernels only (label +{label}): {path} does not "
        "exist. Install a wheel with a CUDA label (+cu...), or build one where nvcc is found: "
        f"`{build}`. To stay on the CPU, move the tensors with .cpu()."
    )


def _open(kind: str) -> signatures.Functions:
    path = library_path(kind)
    if not path.exists():
        raise NativeError(missing_message(kind, path))
    try:
        problem = damage(kind)
    except OSError as error:
        raise NativeError(f"mamba_ssm: {path} cannot be read: {error}. {_REINSTALL}") from error
    if problem:
        raise NativeError(problem)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(
            f"mamba_ssm: {path} was found but the system could not load it: {error}. It needs only the system's "
            "own libraries, so it is damaged, built for another system, or the system libraries are older than "
            "those it was built with. Reinstall mamba_ssm, or build the wheel on this machine: "
            "python setup.py bdist_wheel."
        ) from error
    try:
        functions = signatures.bind(library)
    except AttributeError as error:
        raise NativeError(_mismatch(path, f"it lacks a function ({error})")) from error
    _check_layout(functions, path)
    return functions


def _mismatch(path: Path, what: str) -> str:
    return (
        f"mamba_ssm: {path} does not match this package: {what}. It comes from another version; reinstall mamba_ssm, "
        "or rebuild it (pip install -e . in a source tree)."
    )


def _check_layout(functions: signatures.Functions, path: Path) -> None:
    for struct in abi.STRUCTS:
        found, expected = functions["struct_size"](struct.__name__.encode()), ctypes.sizeof(struct)
        if found != expected:
            raise NativeError(_mismatch(path, f"{struct.__name__} has {found} bytes there and {expected} here"))
    version = _query_info(functions, path).abi_version
    if version != abi.ABI_VERSION:
        raise NativeError(_mismatch(path, f"its ABI version is {version}, this package's {abi.ABI_VERSION}"))


def _query_info(functions: signatures.Functions, path: Path) -> abi.MambaLibraryInfo:
    facts = abi.MambaLibraryInfo()
    code = functions["library_info"](facts)
    if code != abi.OK:
        raise NativeError(f"mamba_ssm: {path} cannot say what it is: {functions['last_error']().decode()}")
    return facts
