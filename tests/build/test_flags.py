"""The flags of csrc/flags.cmake as they reach the compilers: CMake generates the build for Windows and for Linux with
compilers that are not there, and the commands it would run are read."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from wheel_build import preflight_windows, tools

HERE = Path(__file__).resolve().parent
OLDEST_CMAKE = (3, 26)
CMAKE = tools.newest_enough("cmake", os.environ, OLDEST_CMAKE)
NINJA = tools.newest_enough("ninja", os.environ, (1, 0))
READY = CMAKE is not None and CMAKE.numbers >= OLDEST_CMAKE and NINJA is not None

pytestmark = [
    pytest.mark.skipif(not READY, reason="cmake 3.26 or newer and ninja are needed, and one is not here"),
    pytest.mark.skipif(sys.platform == "win32", reason="the pretended toolchain calls /bin/true"),
]


@pytest.fixture(scope="module")
def generate(request, tmp_path_factory):
    """generate(compiler, *CMake arguments) -> the folder of the generated build; each is made once."""
    folders = {}

    def make(compiler, *options):
        if (compiler, options) not in folders:
            folder = tmp_path_factory.mktemp("generated")
            command = [CMAKE.path, "-S", str(HERE.parents[1] / "csrc"), "-B", str(folder), "-G", "Ninja"]
            command += [f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'pretend_toolchain.cmake'}", f"-DPRETEND={compiler}"]
            command += [f"-DCMAKE_MAKE_PROGRAM={NINJA.path}", "-DMAMBA_CUDA=ON"]
            command += ["-DCMAKE_CUDA_ARCHITECTURES=75-real;120-virtual", *options]
            clean = {name: value for name, value in os.environ.items() if not name.endswith(("FLAGS", "_LAUNCHER"))}
            done = subprocess.run(command, env=clean, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            folders[compiler, options] = folder
        return folders[compiler, options]

    return make


def entries(folder):
    return json.loads((folder / "compile_commands.json").read_text())


def flags_of(folder, source):
    """The words of the command that compiles a source; nvcc's -Xcompiler=a,b as -Xcompiler=a, -Xcompiler=b."""
    (entry,) = (entry for entry in entries(folder) if entry["output"].replace(".obj", ".o").endswith(f"{source}.o"))
    words = []
    for word in shlex.split(entry["command"]):
        name, found, value = word.partition("-Xcompiler=")
        words += [f"-Xcompiler={part}" for part in re.split(r"[, ]+", value.strip())] if found and not name else [word]
    return words


def link_flags(folder, library):
    text = (folder / "build.ninja").read_text()
    block = re.search(rf"^build [^\n]*{library}\.(?:dll|so)[^\n]*\n((?: [^\n]*\n)+)", text, re.MULTILINE).group(1)
    return dict(re.findall(r"^  (LINK_FLAGS|LINK_LIBRARIES) = (.*)$", block, re.MULTILINE))


CXX, CUDA = "mamba_cpu.dir/selective_scan/cpu.cpp", "mamba_cuda_bf16.dir/selective_scan/cuda/forward.cu"
GENERIC, AVX2, AVX512 = (f"mamba_cpu_{isa}.dir/selective_scan/cpu/kernels.cpp" for isa in ("generic", "avx2", "avx512"))
HOST = "-Xcompiler="

# compiler, object, the flags it must be compiled with
ROWS = [
    ("MSVC", CXX, "-std:c++17 /Zc:__cplusplus /Zc:preprocessor /utf-8 /EHsc /bigobj /Brepro"),
    ("MSVC", CXX, "/O2 /DNDEBUG -MT"),
    ("MSVC", CXX, "/W3 /w14701 /w14703"),
    ("MSVC", CXX, "-D_USE_MATH_DEFINES -DWIN32_LEAN_AND_MEAN -DNOMINMAX -D_CRT_SECURE_NO_WARNINGS"),
    ("MSVC", AVX2, "/arch:AVX2 /utf-8 /Zc:preprocessor -MT"),
    ("MSVC", AVX512, "/arch:AVX512 /utf-8 /Zc:preprocessor -MT"),
    ("MSVC", CUDA, f"-std=c++17 {HOST}/Zc:__cplusplus {HOST}/Zc:preprocessor {HOST}/utf-8"),
    ("MSVC", CUDA, f"{HOST}/EHsc {HOST}/bigobj {HOST}/Brepro {HOST}/W3"),
    ("MSVC", CUDA, f"{HOST}-O2 {HOST}-MT -DNDEBUG"),
    ("MSVC", CUDA, "-D_USE_MATH_DEFINES -DWIN32_LEAN_AND_MEAN -DNOMINMAX -D_CRT_SECURE_NO_WARNINGS"),
    ("GNU", CXX, "-std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -Wall -Wextra -ffunction-sections"),
    ("GNU", GENERIC, "-O2 --param=sccvn-max-alias-queries-per-access=50"),
    ("GNU", AVX2, "-mavx2 -mfma -mf16c -O3"),
    ("GNU", AVX512, "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -O3"),
    ("GNU", CUDA, f"-std=c++17 -O3 -DNDEBUG {HOST}-fPIC {HOST}-fvisibility=hidden {HOST}-Wall {HOST}-Wextra"),
]


@pytest.mark.parametrize(("compiler", "source", "flags"), ROWS)
def test_row(generate, compiler, source, flags):
    words = flags_of(generate(compiler), source)
    assert [flag for flag in flags.split() if flag not in words] == []


@pytest.mark.parametrize(("source", "prefix", "quote"), [(CXX, "", ""), (CUDA, HOST, '"')])
def test_prefix_maps_are_quoted_for_the_shell_that_nvcc_calls(generate, source, prefix, quote):
    folder = generate("GNU")
    words = flags_of(folder, source)
    for path, name in ((HERE.parents[1] / "csrc", "csrc"), (folder, "build")):
        assert f"{prefix}-ffile-prefix-map={quote}{path}={name}{quote}" in words


@pytest.mark.parametrize("compiler", ["MSVC", "GNU"])
@pytest.mark.parametrize("source", [CXX, AVX512, CUDA])
def test_nothing_of_the_other_compiler(generate, compiler, source):
    words = [word.removeprefix(HOST) for word in flags_of(generate(compiler), source)]
    if compiler == "GNU":
        assert [word for word in words if re.match(r"[/-](Zc|W\d|w1|utf-8|EH|bigobj|Brepro|M[TD]|O[bd])", word)] == []
    else:
        assert [word for word in words if re.match(r"-f(?!orward-unknown)|-m[af]|-Wall|-Wextra|-O3", word)] == []


@pytest.mark.parametrize("source", [CXX, AVX2, AVX512, CUDA])
@pytest.mark.parametrize("options", [(), ("-DMAMBA_DEBUG=ON",), ("-DCMAKE_BUILD_TYPE=Debug",)])
def test_one_static_runtime_on_windows(generate, source, options):
    words = [word.removeprefix(HOST) for word in flags_of(generate("MSVC", *options), source)]
    assert {word for word in words if re.fullmatch(r"[/-]M[TD]d?", word)} == {"-MT"}


@pytest.mark.parametrize("source", [CXX, AVX2, CUDA])
def test_windows_build_is_optimised_without_being_told(generate, source):
    words = [word.removeprefix(HOST) for word in flags_of(generate("MSVC"), source)]
    assert not {"/Od", "-Od", "/RTC1", "-RTC1", "-Zi", "-Z7"} & set(words)


@pytest.mark.parametrize(
    ("compiler", "source", "flags"),
    [
        ("MSVC", CXX, "/O2 -Z7"),
        ("MSVC", CUDA, f"{HOST}-O2 {HOST}-Z7 -lineinfo"),
        ("GNU", CXX, "-O2 -g"),
        ("GNU", CUDA, "-O2 -g -lineinfo"),
    ],
)
def test_debug_keeps_optimisation_and_assertions(generate, compiler, source, flags):
    words = flags_of(generate(compiler, "-DMAMBA_DEBUG=ON"), source)
    assert [flag for flag in flags.split() if flag not in words] == []
    assert not [word for word in words if "NDEBUG" in word or word.removeprefix(HOST) == "-Zi"]


def test_link_for_windows(generate):
    for library in ("mamba_cpu", "mamba_cuda"):
        found = link_flags(generate("MSVC"), library)
        assert "/Brepro" in found["LINK_FLAGS"].split()
        assert "/INCREMENTAL" not in found["LINK_FLAGS"].split()
    assert "cudart_static.lib" in found["LINK_LIBRARIES"].split()
    assert "cudart.lib" not in found["LINK_LIBRARIES"].split()


def test_link_for_linux(generate):
    for library in ("mamba_cpu", "mamba_cuda"):
        found = link_flags(generate("GNU"), library)["LINK_FLAGS"]
        for flag in (
            "--no-undefined",
            "--gc-sections",
            "--version-script=",
            "csrc/exports.map",
            "--as-needed",
            "--strip-all",
        ):
            assert flag in found
    assert "--strip-all" not in link_flags(generate("GNU", "-DMAMBA_DEBUG=ON"), "mamba_cpu")["LINK_FLAGS"]


def test_architectures_reach_nvcc(generate):
    for compiler in ("MSVC", "GNU"):
        words = flags_of(generate(compiler), CUDA)
        assert "--generate-code=arch=compute_75,code=[sm_75]" in words
        assert "--generate-code=arch=compute_120,code=[compute_120]" in words


def test_no_object_path_is_longer_than_preflight_thinks(generate):
    folder = generate("MSVC")
    objects = [os.path.relpath(entry["output"], folder) for entry in entries(folder)]
    assert 40 < max(map(len, objects)) <= preflight_windows.LONGEST_OBJECT
