"""The kernel libraries, loaded without torch: are they there, whole, and of this package?"""

import typing
from pathlib import Path

from mamba_ssm._doctor import REINSTALL
from mamba_ssm._native import abi, loader
from mamba_ssm._native.advice import DRIVER_FLOORS
from mamba_ssm._native.errors import cuda_version_text, driver_problem

Report = dict[str, typing.Any]


def examine(report: Report, problems: list[str], notes: list[str]) -> None:
    """Fills report["build"], ["libraries"] and ["driver"]."""
    info = loader.LIBRARY_FOLDER / "build_info.json"
    told = report["installation"]["missing"] + report["installation"]["changed"]  # as problems of RECORD
    try:
        report["build"] = loader.build_info()
        if not info.exists() and str(info) not in told:
            problems.append(f"{info} is missing: whether the libraries beside it are whole is not known. {REINSTALL}")
    except Exception as error:
        problems.append(str(error))
    if report["build"].get("cross_built"):
        notes.append("this wheel was cross-built on Linux and has not been run on Windows by who built it")
    # Of a file that is named already, the library's own words follow from it.
    own = [] if str(loader.library_path("cpu")) in told else problems
    _examine_library("cpu", report, own, notes)
    if loader.library_path("cuda").exists():
        facts = _examine_library("cuda", report, [] if str(loader.library_path("cuda")) in told else problems, notes)
        if facts is not None:
            report["driver"] = _driver(facts)
            problem = driver_problem(facts.cuda_driver_version, facts.cuda_runtime_version)
            if problem and facts.cuda_driver_version:
                problems.append(problem)
        return
    report["libraries"]["cuda"] = {"path": str(loader.library_path("cuda")), "loaded": False}
    if report["build"].get("cuda") and str(loader.library_path("cuda")) not in told:
        problems.append("lib/build_info.json says that CUDA kernels were built, but the library is missing: reinstall")


def _examine_library(kind: str, report: Report, problems: list[str], notes: list[str]) -> abi.MambaLibraryInfo | None:
    """Loads a library, which compares its file with build_info.json, and notes what it says; returns its facts."""
    path = loader.library_path(kind)
    entry = report["libraries"][kind] = {"path": str(path), "loaded": False}
    try:
        if report["build"] and path.exists() and path.name not in report["build"].get("libraries", {}):
            notes.append(f"build_info.json does not tell of {path.name}: whether the file is whole was not checked")
        facts = loader.info(kind)
    except Exception as error:
        entry["error"] = str(error)
        problems.append(str(error))
        return None
    off = [
        name
        for name, there in (("float16", facts.supports_float16), ("bfloat16", facts.supports_bfloat16))
        if not there
    ]
    entry.update(loaded=True, abi_version=facts.abi_version, isa=facts.isa.decode(), dtypes_off=off)
    return facts


def _driver(facts: abi.MambaLibraryInfo) -> dict[str, str | int | None]:
    return {
        "version": _driver_version(),
        "supports_cuda": cuda_version_text(facts.cuda_driver_version) if facts.cuda_driver_version else None,
        "wheel_cuda": cuda_version_text(facts.cuda_runtime_version),
        "needed": DRIVER_FLOORS.get(facts.cuda_runtime_version // 1000),
    }


def _driver_version() -> str | None:
    """The installed NVIDIA driver's version where Linux says it, else None."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), None)
