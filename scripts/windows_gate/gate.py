"""The stages: what is compiled, linked, looked at and run. Each returns one line for the report or raises GateError."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from wheel_build import cmake, cuda, facts, tools, version
from wheel_build.config import read_config
from wheel_build.plan import Plan, make_plan
from wheel_check import fatbin
from wheel_check.libraries import CUDART_EXPORTS, WINDOWS_LIBRARIES, read_dll

from .compilers import MSVC_VERSION, windows_path, wine_environment
from .toolchain import HERE, MINGW, GateError

ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
CUDA, CPU = "mamba_cuda", "mamba_cpu"
SELF_TEST = "self_test.exe"
ISAS = ("generic", "avx2", "avx512")
WINE_SECONDS = 60  # for a program that does nothing


def make_windows_plan(cache: Path, environ: dict[str, str]) -> Plan:
    """The wheel builder's plan for a Windows machine with the gate's nvcc; the usual switches are read."""
    config, base = read_config({**environ, "MAMBA_SSM_CUDA": "on"}), version.base_version(ROOT)
    nvcc = str(cache / "bin" / "nvcc")
    parsed = cuda.parse_nvcc_version(tools.run(nvcc, "--version"))
    if parsed is None:
        raise GateError(f"{nvcc} --version does not answer as nvcc does")
    seen = replace(
        facts.gather(ROOT, {**environ, "MAMBA_SSM_CUDA": "off"}),
        compiler=tools.Tool(str(cache / "bin" / "clang-cl"), MSVC_VERSION),
        discovery=cuda.Discovery(cuda.Nvcc(nvcc, "CUDACXX")),
        nvcc_version=parsed[0],
        nvcc_full_version=parsed[1],
        nvcc_architectures=tuple(cuda.parse_architectures(tools.run(nvcc, "--list-gpu-arch"))),
        cuda_host="",
    )
    # What this machine lacks is found with the facts as they are, the wheel's name and tag with those of Windows.
    here = make_plan(config, seen, base, version.is_sdist(ROOT))
    if here.fatal:
        raise GateError(here.as_text())
    return make_plan(config, replace(seen, platform="win32", machine="AMD64"), base, version.is_sdist(ROOT))


def with_second_try(name: str, stage: Callable[[], str], say: Callable[[str], None]) -> str:
    """What a stage returns. A stage that fails is reported and called again: very rarely, Wine 8 ends a compiler or a
    test without a message. A failure of ours happens twice.
    """
    try:
        return stage()
    except GateError as error:
        say(f"{name} gets a second try, since Wine ends a program without a word now and then. The first one: {error}")
    return stage()


# ---- compiling and linking -------------------------------------------------------------------------------------------


def call(command: Sequence[str | Path], log: Path, cache: Path, **options) -> str:
    """Runs a command with its output in `log`. Raises GateError with the end of it."""
    environ = {**os.environ, **wine_environment(cache), **options}
    with log.open("a", encoding="utf-8") as output:
        start = output.tell()
        output.write(f"+ {shlex.join(map(str, command))}\n")
        output.flush()
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    text = log.read_text(encoding="utf-8", errors="replace")[start:]
    if done.returncode != 0:
        raise GateError(f"exit status {done.returncode} of {shlex.join(map(str, command))}\n{text[-6000:]}")
    return text


def configure(plan: Plan, cache: Path, name: str, toolchain: str, arguments: Iterable[str]) -> Path:
    assert plan.facts.cmake is not None, "a fatal finding of the plan otherwise"
    assert plan.facts.ninja is not None, "a fatal finding of the plan otherwise"
    folder = cache / name
    # CMake reads a toolchain's flags when it first configures a folder only.
    text, used = (HERE / toolchain).read_text(encoding="utf-8"), folder / "toolchain.cmake"
    if not used.is_file() or used.read_text(encoding="utf-8") != text:
        shutil.rmtree(folder, ignore_errors=True)
    cmake.ask_what_it_finds(folder)
    used.write_text(text, encoding="utf-8")
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    command = [plan.facts.cmake.path, "-S", CSRC, "-B", folder, "-G", "Ninja", "--toolchain", HERE / toolchain]
    call([*command, f"-DCMAKE_MAKE_PROGRAM={plan.facts.ninja.path}", *arguments], log, cache)
    return folder


def build(plan: Plan, folder: Path, cache: Path, target: str) -> str:
    """Compiles what changed. Returns how much that was, and the compilers' warnings."""
    assert plan.facts.ninja is not None, "a fatal finding of the plan otherwise"
    text = call([plan.facts.ninja.path, "-C", folder, "-j", str(plan.jobs), target], folder / "log.txt", cache)
    compiled = len(re.findall(r"Building (?:CXX|CUDA) object", text))
    warnings = sorted(set(re.findall(r"^.*\bwarning\b.*$", text, re.MULTILINE)))
    return "\n".join([f"objects compiled now: {compiled}", *warnings])


def build_cuda(plan: Plan, cache: Path) -> str:
    """All CUDA sources by nvcc.exe in Microsoft mode, linked with NVIDIA's static runtime."""
    arguments = [
        *cmake.arguments(plan, {}),
        f"-DGATE_CACHE={cache}",
        f"-DGATE_CUDA_VERSION={plan.facts.nvcc_full_version}",
        f"-DGATE_MSVC_VERSION=19.{MSVC_VERSION.split('.', 1)[1]}",
    ]
    folder = configure(plan, cache, CUDA, "windows-msvc.cmake", arguments)
    sources = [entry for entry in compile_commands(folder) if entry["file"].endswith(".cu")]
    text = build(plan, folder, cache, CUDA)
    return f"{len(sources)} sources by nvcc.exe {plan.facts.nvcc_full_version}; {text}"


def build_cpu(plan: Plan, cache: Path) -> str:
    """All CPU sources and the native tests by mingw-w64."""
    passed = ("-DMAMBA_DISABLE", "-DCMAKE_CXX_FLAGS")
    arguments = [word for word in cmake.arguments(plan, {}) if word.startswith(passed)]
    folder = configure(plan, cache, CPU, "windows-mingw.cmake", [*arguments, "-DMAMBA_BUILD_TESTS=ON"])
    text = build(plan, folder, cache, "all")
    return f"{len(compile_commands(folder))} compilations by mingw-w64, native tests among them; {text}"


def compile_commands(folder: Path) -> list[dict]:
    return json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))


def command_for(entry: dict, source: Path, output: Path) -> list[str]:
    """The command of a compile_commands.json entry, for another source and without a list of headers."""
    words, result = iter(shlex.split(entry["command"])), []
    for word in words:
        if word in ("-MT", "-MF"):
            next(words)
        elif word == "-o":
            result += [word, str(output)]
            next(words)
        elif word != "-MD":
            result.append(str(source) if word == entry["file"] else word)
    return result


# ---- the CPU sources in Microsoft mode -------------------------------------------------------------------------------


def syntax_only(command: str) -> list[str]:
    """A compile command of clang-cl without its outputs."""
    words = [word for word in shlex.split(command) if not re.match(r"[-/](clang:-M|F[od])", word)]
    return ["/Zs" if word == "-c" else word for word in words]


def missing_standard_header(output: str) -> str | None:
    """The C++ header (its name has no dot) that the gate has no stand-in for. A C or POSIX header is an error."""
    match = re.search(r"fatal error: '([a-z_]+)' file not found", output)
    return match[1] if match else None


def check_cpu(plan: Plan, cache: Path) -> str:
    """The CPU sources through clang-cl in Microsoft mode, with every instruction set's flags."""
    entries = {
        tuple(syntax_only(entry["command"])): entry
        for entry in compile_commands(cache / CUDA)
        if entry["file"].endswith(".cpp")
    }

    def compile_one(command: tuple[str, ...]) -> tuple[int, str]:
        where = entries[command]["directory"]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    unchecked, failed = {}, []
    with ThreadPoolExecutor(plan.jobs) as pool:
        for command, (code, output) in zip(entries, pool.map(compile_one, entries), strict=True):
            source = os.path.relpath(entries[command]["file"], CSRC)
            header = missing_standard_header(output)
            if header:
                unchecked[source] = header
            elif code != 0:
                failed.append(f"{source}\n{output}")
    if failed:
        raise GateError("\n".join(failed))
    lines = [f"{len(entries) - len(unchecked)} of {len(entries)} compilations accepted by clang-cl"]
    lines += [f"not checked: {source}, there is no stand-in for <{name}>" for source, name in sorted(unchecked.items())]
    return "\n".join(lines)


# ---- what the libraries hold -----------------------------------------------------------------------------------------


def declared_functions(header: str) -> set[str]:
    return set(re.findall(r"^MAMBA_API .*?(mamba_\w+)\(", header, re.MULTILINE))


def check_dll(path: Path, architectures: Sequence[str]) -> str:
    """Exports are those of mamba_kernels.h, imports are Windows' own, device code is there for these architectures."""
    library = read_dll(path.read_bytes())
    problems = list(library.problems)
    declared = declared_functions((CSRC / "include" / "mamba_kernels.h").read_text(encoding="utf-8"))
    exported = set(library.exported) - (CUDART_EXPORTS if architectures else set())
    problems += [f"does not export {name}" for name in sorted(declared - exported)]
    problems += [f"exports {name}, which mamba_kernels.h does not declare" for name in sorted(exported - declared)]
    for name in library.needed:
        if not WINDOWS_LIBRARIES.fullmatch(name.lower()):
            problems.append(f"imports {name}, which is no part of Windows")
    containers = fatbin.containers(library.device_code)
    if architectures and not containers:
        problems.append("holds no device code")
    for container in containers:
        found = sorted({entry.target for entry in container})
        if found != sorted(architectures):
            problems.append(f"holds device code for {' '.join(found)}, asked for: {' '.join(architectures) or 'none'}")
    if problems:
        raise GateError("\n".join(f"{path.name} {problem}" for problem in dict.fromkeys(problems)))
    code = f", device code of {len(containers)} sources for {' '.join(architectures)}" if architectures else ""
    return f"{path.name}: {len(exported)} exports, imports {', '.join(sorted(library.needed))}{code}"


def check_dlls(plan: Plan, cache: Path) -> str:
    return "\n".join([check_dll(dll(cache, CPU), []), check_dll(dll(cache, CUDA), plan.architectures.cmake)])


def dll(cache: Path, name: str) -> Path:
    return cache / name / "lib" / f"{name}.dll"


# ---- running them under Wine -----------------------------------------------------------------------------------------


@contextmanager
def wine_services(cache: Path) -> Iterator[None]:
    """Wine's services, which the first of several programs starts and the last one ends, run for that long.

    They inherit that first program's output, so that who waits for its end waits for theirs: here it is a shell. ctest
    would take it for a test that runs until all others have ended, one at a time.
    """
    environ, pipe = {**os.environ, **wine_environment(cache)}, subprocess.PIPE
    with subprocess.Popen(["wine", "cmd"], env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as shell:
        assert shell.stdin is not None and shell.stdout is not None
        try:
            greets, _, _ = select.select([shell.stdout], [], [], WINE_SECONDS)
            if not greets or not shell.stdout.read(1):
                raise GateError(f"`wine cmd` does not start within {WINE_SECONDS} s, or ends at once")
            yield
            shell.stdin.close()  # at which it ends
            with suppress(subprocess.TimeoutExpired):
                shell.wait(WINE_SECONDS)
        finally:
            shell.kill()


def build_self_test(cache: Path) -> None:
    command = [f"{MINGW}-gcc-posix", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-static"]
    source = HERE / "native" / "self_test.c"
    call([*command, "-I", CSRC / "include", "-o", cache / SELF_TEST, source], cache / "self_test.txt", cache)


def run_self_test(cache: Path, library: Path, isa: str = "") -> str:
    """The self-test's last lines. Raises GateError if a check fails or the library cannot be loaded."""
    environ = {**os.environ, **wine_environment(cache), "MAMBA_SSM_CPU_ISA": isa}
    command = ["wine", str(cache / SELF_TEST), windows_path(str(library))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    output = done.stdout.strip()
    if done.returncode != 0:
        raise GateError(f"{library.name} {isa}: the self-test ends with {done.returncode}\n{output}\n{done.stderr}")
    return output.replace("\n", "; ")


def self_test(plan: Plan, cache: Path) -> str:
    """Both libraries loaded and called: the CPU's results against stored ones, CUDA's error without a driver."""
    build_self_test(cache)
    lines = []
    with wine_services(cache):
        for isa in ISAS:
            try:
                lines.append(run_self_test(cache, dll(cache, CPU), isa))
            except GateError as error:
                if "this CPU has no more than" not in str(error):
                    raise
                lines.append(f"{CPU}: {isa} not run, this CPU does not have it")
        return "\n".join([*lines, run_self_test(cache, dll(cache, CUDA))])


def native_tests(plan: Plan, cache: Path) -> str:
    """The native CPU tests of csrc/tests, built for Windows, under Wine."""
    assert plan.facts.cmake is not None, "a fatal finding of the plan otherwise"
    ctest = Path(plan.facts.cmake.path).with_name("ctest")
    folder = cache / CPU
    command = [
        ctest,
        "--test-dir",
        folder,
        "-L",
        "cpu",
        "-j",
        str(plan.jobs),
        "--no-tests=error",
        "--output-on-failure",
    ]
    with wine_services(cache):
        text = call(command, folder / "log.txt", cache, WINEPATH=windows_path(str(folder / "lib")))
    match = re.search(r"^.*tests passed.*$", text, re.MULTILINE)
    return match[0] if match else "passed"
