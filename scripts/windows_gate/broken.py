"""`selftest`: what is planted for each stage of the gate must be caught there, and for the reason it was planted."""

from __future__ import annotations

import shlex
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from wheel_build.plan import Plan
from wheel_check import verify

from . import gate
from .compilers import TARGET
from .toolchain import HERE, MINGW, GateError

SOURCES = HERE / "broken_sources"
# One planted thing: the stage that must catch it, its name, what the stage must say, and the try itself (its output).
Planted = tuple[str, str, str, Callable[[], str]]


def expected(source: Path) -> str:
    """The message that the first line of a broken source asks for."""
    first = source.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.partition("// expect: ")[2]


def output_of(command: list[str], folder: Path) -> str:
    """What a command says as it fails; "" where it does not fail."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr if done.returncode != 0 else ""


def error_of(stage: Callable[[], object]) -> str:
    """What a stage says as it fails; "" where it passes."""
    try:
        stage()
    except GateError as error:
        return str(error)
    return ""


def sources(cache: Path, folder: Path) -> Iterator[Planted]:
    """Constructs that Visual C++ does not know, compiled as csrc is: .cu by nvcc.exe, .cpp by clang-cl."""
    entries = {Path(entry["file"]).suffix: entry for entry in gate.compile_commands(cache / gate.CUDA)}
    for source in sorted(SOURCES.iterdir()):
        entry = entries[source.suffix]
        command = gate.command_for(entry, source, folder / f"{source.name}.obj")
        if source.suffix == ".cpp":
            command = gate.syntax_only(shlex.join(command))
        stage = gate.CUDA if source.suffix == ".cu" else "CPU sources"
        yield stage, source.name, expected(source), partial(output_of, command, Path(entry["directory"]))


def stand_in(folder: Path, name: str, code: str, *options: str) -> Path:
    """A DLL of our own making in the place of a library."""
    source, library = folder / f"{name}.c", folder / f"{name}.dll"
    source.write_text(code, encoding="utf-8")
    command = [f"{MINGW}-gcc-posix", "-shared", "-o", str(library), str(source), *options]
    if output := output_of(command, folder):
        raise GateError(f"{name}.c does not compile:\n{output}")
    return library


def hollow(folder: Path, name: str, *options: str, is_cuda: int = 0, left_out: str = "", more: str = "") -> Path:
    """A library that exports the C ABI and returns MAMBA_OK from everything, having done nothing."""
    declared = gate.declared_functions((gate.CSRC / "include" / "mamba_kernels.h").read_text(encoding="utf-8"))
    lines = [
        f'__declspec(dllexport) const char* {function}(void) {{ return ""; }}'
        if function == "mamba_last_error"
        else f"__declspec(dllexport) long long {function}(int* data) {{ (void)data; return 0; }}"
        for function in sorted(declared - {left_out, "mamba_library_info"})
    ]
    lines += [f"__declspec(dllexport) int mamba_library_info(int* info) {{ info[1] = {is_cuda}; return 0; }}", more]
    return stand_in(folder, name, "\n".join(lines) + "\n", *options)


def libraries(cache: Path, folder: Path) -> Iterator[Planted]:
    """Links, contents of DLLs, loading, results."""
    (folder / "undefined.cpp").write_text("int missing(); int (*use)() = missing;\n", encoding="utf-8")
    output_of([str(cache / "bin" / "clang-cl"), *TARGET, "-X", "/c", "/Foundefined.obj", "--", "undefined.cpp"], folder)
    link = [str(cache / "bin" / "lld-link"), "/nologo", "/dll", "/noentry", "/nodefaultlib", "/out:undefined.dll"]
    yield "link", "a function nobody defines", "undefined symbol", partial(output_of, [*link, "undefined.obj"], folder)

    def look(library: Path, *architectures: str) -> Callable[[], str]:
        return partial(error_of, partial(gate.check_dll, library, architectures))

    what, header = "what the DLLs hold", "mamba_ssd_forward"
    cuda = gate.dll(cache, gate.CUDA)
    yield what, "another architecture asked for", "asked for: 35-real", look(cuda, "35-real")
    yield what, "no device code", "holds no device code", look(hollow(folder, "no_code"), "90-real")
    lacking = hollow(folder, "lacking", left_out=header)
    yield what, "a function left out", f"does not export {header}", look(lacking)
    extra = hollow(folder, "extra", more="__declspec(dllexport) int helper(void) { return 0; }")
    yield what, "a function too many", "exports helper", look(extra)
    runtime = stand_in(folder, "vcruntime140", "__declspec(dllexport) int planted(void) { return 0; }\n")
    uses = "__declspec(dllimport) int planted(void);\n__declspec(dllexport) int mamba_use(void) { return planted(); }"
    importing = hollow(folder, "importing", str(runtime), more=uses)
    yield what, "a DLL that Windows lacks", "imports vcruntime140.dll", look(importing)

    gate.build_self_test(cache)

    def test(library: Path) -> Callable[[], str]:
        return partial(error_of, partial(gate.run_self_test, cache, library))

    run = "self-test"
    refusal = "int __stdcall DllMain(void* dll, int reason, void* rest) { return 0; }"
    yield run, "a DLL that does not load", "cannot be loaded", test(hollow(folder, "refuses", more=refusal))
    sizeless = hollow(folder, "sizeless", left_out="mamba_struct_size")
    yield run, "a function left out", "mamba_struct_size is not exported", test(sizeless)
    for result in ("scan out", "scan dA", "conv dweight", "conv update state", "state update out", "ssd dx", "norm dz"):
        idle = test(hollow(folder, "idle"))
        yield run, f"a library that computes nothing: {result}", f"FAIL {result}", idle
    idle = test(hollow(folder, "idle_cuda", is_cuda=1))
    yield run, "no driver, and no error", "does not return MAMBA_ERROR_DRIVER", idle


def wheels(cache: Path, folder: Path) -> Iterator[Planted]:
    (wheel,) = (cache / "dist").glob("*.whl")
    changed = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry, data + b"# planted\n" if entry.filename.endswith("mamba_ssm/__init__.py") else data)
    yield (
        "wheel",
        "a file changed after the build",
        "its hash is not the one in RECORD",
        lambda: "\n".join(verify(changed)),
    )


def tried(one: Planted) -> str:
    """What is said of a planted thing; a second try where Wine may have ended a program too early to say it."""
    _, _, message, attempt = one
    output = attempt()
    return output if message in output else attempt()


def main(plan: Plan, cache: Path, say: Callable[[str], None]) -> int:
    folder = cache / "planted"
    folder.mkdir(exist_ok=True)
    if not gate.dll(cache, gate.CUDA).is_file() or not (cache / "dist").is_dir():
        raise GateError("selftest takes the libraries and the wheel of a run: python scripts/windows_gate")
    missed = 0
    with ThreadPoolExecutor(plan.jobs) as pool:
        planted = [*sources(cache, folder), *libraries(cache, folder), *wheels(cache, folder)]
        for (stage, name, message, _), output in zip(planted, pool.map(tried, planted), strict=True):
            caught = message != "" and message in output
            missed += not caught
            say(f"{'caught' if caught else 'MISSED'}  {stage}: {name} ({message})")
            if not caught:
                print(output[-2000:])
    say(f"{len(planted)} planted, {missed} missed")
    return 1 if missed else 0
