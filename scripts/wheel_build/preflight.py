"""Findings: what would stop or surprise this build, each with a stable code, the fact seen and the cure."""

from __future__ import annotations

from dataclasses import dataclass

from .advice import with_variables
from .config import Config, SwitchError
from .cuda import OLDEST_NVCC
from .facts import GIB, Facts

FATAL, WARNING, NOTE = "fatal", "warning", "note"
OLDEST_CMAKE = (3, 26)
MEMORY_PER_NVCC_THREAD = 3 * GIB
MEMORY_PER_JOB = 1 * GIB
SOURCE_NEVER = '";,|\\\n'
SOURCE_NEVER_CUDA = SOURCE_NEVER + "'$`"
TEMP_NEVER_CUDA = SOURCE_NEVER_CUDA + "\t ()&<>"
# A build folder for all architectures holds 80 MB, one for the CPU 10 MB; debug builds are larger.
DISK_CUDA = GIB // 2
DISK_CPU = GIB // 8


@dataclass(frozen=True)
class Finding:
    code: str
    severity: str
    fact: str
    cure: str


def check_switches(config: Config) -> list[Finding]:
    findings = [switch_finding(error) for error in config.errors]
    findings += [Finding("switch-without-effect", NOTE, note, "leave it out") for note in config.notes]
    for name, meant in config.misspelt:
        if meant:
            fact = f"{name} is set, and no switch has this name: it is not read"
            findings.append(
                Finding("switch-unknown", WARNING, fact, f"write {meant} if that is meant, or unset {name}")
            )
        else:
            fact = f"{name} is set, and no switch has this name, nor one like it"
            findings.append(Finding("switch-unknown", NOTE, fact, f"unset {name} if it was meant for this build"))
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
    if nvcc is not None:
        findings += _check_nvcc(nvcc.path, facts)
    elif not any(finding.severity == FATAL for finding in findings):
        findings.append(_nvcc_missing(config, facts))
    if config.cuda_host and not facts.cuda_host:
        findings.append(
            Finding(
                "host-compiler-wrong",
                FATAL,
                f"CUDAHOSTCXX is {config.cuda_host!r}, which is no program",
                "point it at the C++ compiler for nvcc, or unset it",
            )
        )
    if nvcc is not None and facts.torch and not facts.torch_cuda:
        findings.append(
            Finding(
                "torch-cpu-only",
                NOTE,
                f"torch {facts.torch} here has no CUDA, nvcc is there: fine, the build needs no torch",
                "nothing for the build; to use a GPU in this environment, install a torch with CUDA (pytorch.org)",
            )
        )
    return findings


def _check_nvcc(path: str, facts: Facts) -> list[Finding]:
    """What keeps the nvcc that was found from compiling, if anything does."""
    if facts.nvcc_version is None:
        trouble = facts.nvcc_trouble or f"{path} does not run"
        return [Finding("nvcc-broken", FATAL, trouble, "mend what it says, or reinstall the CUDA toolkit")]
    if facts.nvcc_version < OLDEST_NVCC:
        return [
            Finding(
                "nvcc-too-old",
                FATAL,
                f"nvcc {facts.nvcc_full_version} at {path} is older than 12.0",
                "install CUDA 12.0 or newer, or hide this one and set MAMBA_SSM_CUDA=on to get nvcc from PyPI",
            )
        ]
    if facts.nvcc_missing_parts:
        return [
            Finding(
                "toolkit-incomplete",
                FATAL,
                f"nvcc is at {path}, but its toolkit lacks {', '.join(facts.nvcc_missing_parts)}",
                "run the CUDA installer again and choose all of Development, or point CUDA_HOME at a whole toolkit",
            )
        ]
    if facts.nvcc_trouble:
        return [
            Finding(
                "compiler-refused",
                FATAL,
                f"nvcc {facts.nvcc_full_version} cannot use this host compiler: {facts.nvcc_trouble}",
                f"{_install_compiler('g++-12', ' that this nvcc supports')}, and set CXX to it",
            )
        ]
    return []


def _install_compiler(example: str, which: str = "") -> str:
    return f"install a C++ compiler{which}, such as {example} (on Debian and Ubuntu: apt install {example})"


def _nvcc_missing(config: Config, facts: Facts) -> Finding:
    toolkit = "install a CUDA toolkit (12.0 or newer) and set CUDA_HOME if it is in an unusual folder"
    pip = with_variables(facts.platform, "pip wheel --no-deps -w dist .", MAMBA_SSM_CUDA="on")
    from_pypi = f"build with `{pip}`, which gets nvcc from PyPI"
    off, auto = (with_variables(facts.platform, MAMBA_SSM_CUDA=word) for word in ("off", "auto"))
    if config.cuda == "on":
        return Finding("nvcc-missing", FATAL, "MAMBA_SSM_CUDA=on, but no nvcc was found", f"{toolkit}; or {from_pypi}")
    if facts.driver:
        return Finding(
            "nvcc-missing-with-driver",
            FATAL,
            f"this machine has an NVIDIA driver ({facts.driver}) but no nvcc: a wheel built now could not use its GPU",
            f"{toolkit}; or {from_pypi}; or `{off}` for a CPU-only wheel",
        )
    if config.cuda == "auto":
        fact = "MAMBA_SSM_CUDA=auto, and no nvcc was found: the wheel is CPU-only and cannot use a GPU"
        return Finding("cuda-left-out", NOTE, fact, f"for GPUs, {toolkit}; or {from_pypi}")
    return Finding(
        "cuda-left-out",
        WARNING,
        "no nvcc was found: THE WHEEL IS CPU-ONLY and cannot use a GPU",
        f"`{off}` says that this is meant, `{auto}` that it will do; for GPUs, {toolkit}; or {from_pypi}",
    )


def check_tools(config: Config, facts: Facts, other_generator: bool = False) -> list[Finding]:
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
    if facts.compiler is None and config.cxx:
        fact = f"CXX is {config.cxx!r}, which is no program"
        findings.append(Finding("compiler-missing", FATAL, fact, "point it at a C++ compiler or unset it"))
    elif facts.compiler is None and facts.platform != "win32":
        cure = f"{_install_compiler('g++')}, or set CXX to one that is here"
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


def check_paths(facts: Facts, cuda: bool) -> list[Finding]:
    """Characters in paths that CMake, the linker or the shells that nvcc calls take for their own."""
    if facts.platform == "win32":
        return []  # preflight_windows
    findings = []
    met = _met(facts.root, SOURCE_NEVER_CUDA if cuda else SOURCE_NEVER)
    if met:
        fact = (
            f"the path {facts.root!r} holds {met}, and {'nvcc' if cuda else 'CMake or the linker'} cannot build there"
        )
        cure = "move the source to a path without; spaces, brackets and letters of any kind are fine"
        findings.append(Finding("path-special", FATAL, fact, cure))
    met = _met(facts.temp, TEMP_NEVER_CUDA) if cuda else ""
    if met:
        fact = f"the folder for temporary files is {facts.temp!r}; it holds {met}, and nvcc cannot work there"
        findings.append(Finding("path-special", FATAL, fact, "TMPDIR=/tmp, or another path without"))
    return findings


def _met(path: str, characters: str) -> str:
    return " and ".join(repr(char) for char in dict.fromkeys(path) if char in characters)


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
    return findings


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
