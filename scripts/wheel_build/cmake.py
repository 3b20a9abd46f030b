"""From the plan to CMake's arguments, and the calls of CMake themselves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from . import preflight_windows, progress
from .config import COMPILER_FLAGS
from .plan import Plan, show

# CMake reads these when it first configures a folder only, so a change of one takes another folder.
CONFIGURE_ONCE = ("CC", "CXX", "LDFLAGS", "CMAKE_GENERATOR", "CUDAHOSTCXX", *COMPILER_FLAGS)


class BuildError(Exception):
    """CMake or the compiler failed; what they said stands above."""


def arguments(plan: Plan, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The -D arguments that carry the plan's decisions; the user's CMAKE_ARGS come last."""
    config, seen = plan.config, plan.facts
    switch = {True: "ON", False: "OFF"}
    result = [
        f"-DMAMBA_CUDA={switch[plan.cuda]}",
        f"-DMAMBA_DISABLE_HALF={switch[config.disable_half]}",
        f"-DMAMBA_DISABLE_BF16={switch[config.disable_bf16]}",
        f"-DMAMBA_DEBUG={switch[config.debug]}",
        f"-DMAMBA_GLIBC={plan.glibc}",
    ]
    if plan.glibc and seen.zig is not None:
        result.append(f"-DMAMBA_ZIG={seen.zig.path}")
    if plan.cuda and seen.discovery.nvcc is not None:
        result += [
            f"-DMAMBA_NVCC_THREADS={plan.nvcc_threads}",
            f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(plan.architectures.cmake)}",
            f"-DCMAKE_CUDA_COMPILER={_slashes(seen.discovery.nvcc.path)}",
        ]
        if seen.cuda_host:
            result.append(f"-DCMAKE_CUDA_HOST_COMPILER={_slashes(seen.cuda_host)}")
    if seen.platform == "win32" and seen.compiler and seen.compiler.target and not environ.get("CXX"):
        # CMake would take a g++ on PATH (Perl and Git bring one) before cl.
        result.append(f"-DCMAKE_CXX_COMPILER={_slashes(seen.compiler.path)}")
    return [*result, *config.cmake_args]


def environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment CMake runs in: the user's or Visual Studio's, and what NVIDIA's wheels need to link."""
    result = dict(plan.facts.environment or environ)
    if plan.facts.platform == "win32":
        # Ninja learns the headers from cl's messages, and loses them in some languages. English where it is installed.
        result.setdefault("VSLANG", "1033")
    if plan.facts.cuda_flags:
        result["CUDAFLAGS"] = f"{result.get('CUDAFLAGS', '')} {plan.facts.cuda_flags}".strip()
    # The plan names the architectures; CMake's own variable for them must not reach its compiler test.
    result.pop("CUDAARCHS", None)
    return result


def build_folder(base: Path, plan: Plan, environ: Mapping[str, str]) -> Path:
    """One folder a configuration, so a rebuild compiles what changed and none sees another's output."""
    passing = ["-DMAMBA_NVCC_THREADS=", "-DMAMBA_ZIG="]
    if nvcc_from_wheels(plan):
        passing.append("-DCMAKE_CUDA_COMPILER=")
    words = [word for word in arguments(plan, environ) if not word.startswith(tuple(passing))]
    words += [f"{name}={environ.get(name, '')}" for name in CONFIGURE_ONCE]
    words += [plan.facts.root, plan.facts.nvcc_full_version if plan.cuda else ""]
    key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
    return base / f"native-{plan.label.split('.')[0]}-{key}"


def nvcc_from_wheels(plan: Plan) -> bool:
    """nvcc of an isolated build environment, whose folder is another one each time and gone afterwards."""
    nvcc = plan.facts.discovery.nvcc
    return plan.cuda and nvcc is not None and nvcc.source == "wheels"


def build(plan: Plan, source: Path, base: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Configures and builds; returns the folder that now holds exactly this configuration's libraries in lib/."""
    folder = build_folder(base, plan, environ).absolute()
    if plan.facts.platform == "win32" and preflight_windows.path_too_long(str(folder)):
        raise BuildError(
            f"objects in {folder} would have paths of more than 260 characters, which Windows' compilers cannot open; "
            f"{preflight_windows.SHORTER_PATH}"
        )
    if nvcc_from_wheels(plan):
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    ask_what_it_finds(folder)

    assert plan.facts.cmake is not None, "preflight stops a build without cmake"
    cmake = plan.facts.cmake.path
    configure = [cmake, "-S", str(source), "-B", str(folder)]
    with_ninja = not environ.get("CMAKE_GENERATOR") and not any(word[:2] == "-G" for word in plan.config.cmake_args)
    if with_ninja:
        assert plan.facts.ninja is not None, "preflight stops a build without ninja"
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_slashes(plan.facts.ninja.path)}"]
    configure += arguments(plan, environ)
    variables = environment(plan, environ)
    hint = what_took_part(environ)
    _call(configure, variables, hint, subprocess.call)
    targets = ["mamba_cpu", "mamba_cuda"] if plan.cuda else ["mamba_cpu"]
    # For generators that hold several, such as Visual Studio's; Ninja has one and does not mind.
    kind = "RelWithDebInfo" if plan.config.debug else "Release"
    command = [cmake, "--build", str(folder), "--config", kind, "--parallel", str(plan.jobs), "--target", *targets]
    # Who asks for the compilers' commands gets ninja's lines as they are.
    verbose = environ.get("VERBOSE") or any("CMAKE_VERBOSE_MAKEFILE" in word for word in plan.config.cmake_args)
    running = min(plan.facts.cores, plan.processes)
    counting = partial(progress.run, plan.architectures.count, running)
    _call(command, variables, hint, counting if with_ninja and not verbose else subprocess.call)
    return folder


def _call(command: list[str], environ: dict[str, str], hint: str, run: Callable[..., int]) -> None:
    show(f"+ {subprocess.list2cmdline(command)}")
    code = run(command, env=environ)
    if code != 0:
        name = os.path.basename(command[0])
        raise BuildError(f"{name} failed with exit status {code}; its messages stand above{hint}")


def what_took_part(environ: Mapping[str, str]) -> str:
    """The user's variables, for the message of a failure: cmake and compilers do not say where a flag is from."""
    names = [name for name in ("CMAKE_ARGS", *CONFIGURE_ONCE) if environ.get(name)]
    if not names:
        return ""
    values = ", ".join(f"{name}={environ[name]!r}" for name in names)
    return f". They were also told {values}: if the messages are about one of these, build without it"


def _slashes(path: str) -> str:
    """CMake reads a backslash as an escape."""
    return path.replace("\\", "/")


# ---- what CMake found ------------------------------------------------------------------------------------------------


def ask_what_it_finds(folder: Path) -> None:
    """Before it configures: what `toolchains` and `flags` read afterwards."""
    query = folder / ".cmake" / "api" / "v1" / "query"
    query.mkdir(parents=True, exist_ok=True)
    for name in ("toolchains-v1", "cache-v2"):
        (query / name).touch()


def toolchains(folder: Path) -> dict[str, str]:
    """{"CXX": "GNU 12.2.0", "CUDA": "NVIDIA 13.0.88"} as CMake's file API tells it."""
    result = {}
    for toolchain in _reply(folder, "toolchains-v1").get("toolchains", []):
        compiler = toolchain.get("compiler", {})
        result[toolchain["language"]] = f"{compiler.get('id', '?')} {compiler.get('version', '?')}"
    return result


def flags(folder: Path) -> dict[str, str]:
    """The compilers' general flags, without this machine's paths: the same build elsewhere records the same."""
    cache = {entry["name"]: entry["value"] for entry in _reply(folder, "cache-v2").get("entries", [])}
    build_type = cache.get("CMAKE_BUILD_TYPE", "Release").upper()
    result = {}
    for language in ("CXX", "CUDA"):
        if f"CMAKE_{language}_COMPILER" in cache:
            names = (f"CMAKE_{language}_FLAGS", f"CMAKE_{language}_FLAGS_{build_type}")
            words = " ".join(cache.get(name, "") for name in names).split()
            result[language.lower()] = " ".join(word for word in words if "/" not in word[2:] and "\\" not in word)
    return result


def _reply(folder: Path, name: str) -> dict:
    answers = sorted((folder / ".cmake" / "api" / "v1" / "reply").glob("index-*.json"))
    if not answers:
        return {}
    index = json.loads(answers[-1].read_text(encoding="utf-8"))
    reference = index.get("reply", {}).get(name, {}).get("jsonFile")
    return json.loads((answers[-1].parent / reference).read_text(encoding="utf-8")) if reference else {}
