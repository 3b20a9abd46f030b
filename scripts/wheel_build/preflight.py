"""Findings: what would stop or surprise this build, each with a stable code, the fact seen and the cure."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config, SwitchError
from .cuda import OLDEST_NVCC
from .facts import GIB, Facts

FATAL, WARNING, NOTE = "fatal", "warning", "note"
OLDEST_CMAKE = (3, 26)
MEMORY_PER_NVCC_THREAD = 3 * GIB
MEMORY_PER_JOB = 1 * GIB
DISK_CUDA = 2 * GIB
DISK_CPU = GIB // 2
# Windows' own limit is 260; a CMake object path adds about this much to the folder's.
LONGEST_WINDOWS_ROOT = 120


@dataclass(frozen=True)
class Finding:
    code: str
    severity: str
    fact: str
    cure: str


def check_switches(config: Config) -> list[Finding]:
    findings = [switch_finding(error) for error in config.errors]
    findings += [Finding("switch-without-effect", NOTE, note, "leave it out") for note in config.notes]
    return findings


def switch_finding(error: SwitchError) -> Finding:
    return Finding(error.code, FATAL, f"{error.switch} is {error.value!r}", f"set it to: {error.allowed}")


def check_cuda(config: Config, facts: Facts) -> list[Finding]:
    """Whether CUDA can be built as asked. Nothing is said with MAMBA_SSM_CUDA=off."""
    if config.cuda == "off":
        return []
    findings = []
    for variable, value in facts.discovery.wrong:
        if variable == "CUDACXX":
            findings.append(
                Finding(
                    "nvcc-path-wrong",
                    FATAL,
                    f"CUDACXX is {value!r}, which is no program",
                    "point it at nvcc or unset it",
                )
            )
        else:
            findings.append(
                Finding(
                    "nvcc-path-wrong",
                    WARNING,
                    f"{variable} is {value!r}, where there is no bin/nvcc; looked elsewhere",
                    "point it at a CUDA toolkit or unset it",
                )
            )
    nvcc = facts.discovery.nvcc
    if nvcc is None and not any(finding.severity == FATAL for finding in findings):
        findings.append(_nvcc_missing(config, facts))
    elif nvcc is not None and facts.nvcc_version is None:
        findings.append(
            Finding(
                "nvcc-broken", FATAL, facts.nvcc_trouble or f"{nvcc.path} does not run", "reinstall the CUDA toolkit"
            )
        )
    elif nvcc is not None and facts.nvcc_version is not None and facts.nvcc_version < OLDEST_NVCC:
        findings.append(
            Finding(
                "nvcc-too-old",
                FATAL,
                f"nvcc {facts.nvcc_full_version} at {nvcc.path} is older than 12.0",
                "install CUDA 12.0 or newer, or hide this one and set MAMBA_SSM_CUDA=on to get nvcc from PyPI",
            )
        )
    elif nvcc is not None and facts.nvcc_trouble:
        findings.append(
            Finding(
                "compiler-refused",
                FATAL,
                f"nvcc {facts.nvcc_full_version} cannot use this host compiler: {facts.nvcc_trouble}",
                "set CXX (or CUDAHOSTCXX) to a compiler that this nvcc supports, such as g++-12",
            )
        )
    return findings


def _nvcc_missing(config: Config, facts: Facts) -> Finding:
    toolkit = "install a CUDA toolkit (12.0 or newer) and set CUDA_HOME if it is in an unusual folder"
    from_pypi = "build with `MAMBA_SSM_CUDA=on pip wheel --no-deps -w dist .`, which gets nvcc from PyPI"
    if config.cuda == "on":
        return Finding("nvcc-missing", FATAL, "MAMBA_SSM_CUDA=on, but no nvcc was found", f"{toolkit}; or {from_pypi}")
    if facts.driver:
        return Finding(
            "nvcc-missing-with-driver",
            FATAL,
            f"this machine has an NVIDIA driver ({facts.driver}) but no nvcc: a wheel built now could not use its GPU",
            f"{toolkit}; or {from_pypi}; or set MAMBA_SSM_CUDA=off for a CPU-only wheel",
        )
    return Finding(
        "cuda-left-out",
        WARNING,
        "no nvcc was found: THIS WHEEL IS CPU-ONLY (labelled +cpu) and cannot use a GPU",
        f"for GPUs, {toolkit}; or {from_pypi}; MAMBA_SSM_CUDA=off says that CPU-only is meant",
    )


def check_tools(facts: Facts, other_generator: bool = False) -> list[Finding]:
    """Platform, compiler, cmake, ninja. `other_generator`: CMAKE_GENERATOR or -G chose one, so ninja is not needed."""
    findings = []
    if facts.platform not in ("linux", "win32") or facts.machine.lower() not in ("x86_64", "amd64"):
        findings.append(
            Finding(
                "platform-unsupported",
                FATAL,
                f"this is {facts.platform} on {facts.machine}",
                "build on Linux or Windows on x86-64",
            )
        )
    if facts.compiler is None:
        cure = "install one, such as g++ (apt install g++), or set CXX"
        if facts.platform == "win32":
            cure = "install Visual Studio 2022 Build Tools with C++, and build in its x64 Developer prompt"
        findings.append(Finding("compiler-missing", FATAL, "no C++ compiler was found", cure))
    cure = 'pip install "cmake>=3.26" ninja'
    if facts.cmake is None:
        findings.append(Finding("cmake-missing", FATAL, "cmake was not found", cure))
    elif facts.cmake.numbers < OLDEST_CMAKE:
        fact = f"cmake {facts.cmake.version} at {facts.cmake.path} is older than 3.26"
        findings.append(Finding("cmake-too-old", FATAL, fact, cure))
    if facts.ninja is None and not other_generator:
        findings.append(Finding("ninja-missing", FATAL, "ninja was not found", cure))
    return findings


def check_release(config: Config, facts: Facts) -> list[Finding]:
    """What MAMBA_RELEASE needs; nothing is said without it."""
    if not config.release:
        return []
    if facts.platform == "win32":
        fact = "MAMBA_RELEASE is set and changes nothing here: a wheel for Windows brings all that it needs in any case"
        return [Finding("switch-without-effect", NOTE, fact, "leave it out")]
    findings = []
    if config.debug:
        fact = "MAMBA_RELEASE and DEBUG are both set: nobody publishes a wheel with symbols and assertions"
        findings.append(Finding("release-debug", FATAL, fact, "unset one of them"))
    for tool, name, what in (
        (facts.zig, "ziglang", "links the libraries for older systems"),
        (facts.auditwheel, "auditwheel", "checks that they load there"),
    ):
        if tool is None:
            fact = f"MAMBA_RELEASE is set, and {name}, which {what}, is not installed in this Python"
            findings.append(Finding(f"{name}-missing", FATAL, fact, f"pip install {name}; or unset MAMBA_RELEASE"))
    return findings


def check_room(facts: Facts, cuda: bool) -> list[Finding]:
    """Memory, disk, and a folder that can be written."""
    findings = []
    if not facts.writable:
        findings.append(
            Finding(
                "folder-unwritable",
                FATAL,
                f"{facts.root} cannot be written",
                "build in a copy of the source that you own",
            )
        )
    need = MEMORY_PER_NVCC_THREAD if cuda else MEMORY_PER_JOB
    if facts.memory is not None and facts.memory < need:
        fact = f"{_gib(facts.memory)} GiB of memory is free; one compiler process can need {_gib(need)}"
        severity = FATAL if facts.memory < need // 6 else WARNING
        findings.append(
            Finding("memory-low", severity, fact, "close other programs, add swap, or build on a larger machine")
        )
    need = DISK_CUDA if cuda else DISK_CPU
    if facts.disk is not None and facts.disk < need:
        fact = f"{_gib(facts.disk)} GiB of disk is free in {facts.root}; the build needs about {_gib(need)}"
        severity = FATAL if facts.disk < need // 4 else WARNING
        findings.append(Finding("disk-low", severity, fact, "free some disk space"))
    if facts.platform == "win32" and len(facts.root) > LONGEST_WINDOWS_ROOT:
        fact = f"the source folder's path has {len(facts.root)} characters, and Windows stops at 260"
        findings.append(Finding("path-long", WARNING, fact, "move the source to a short path, such as C:\\src\\mamba"))
    return findings


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
