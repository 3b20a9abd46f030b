"""What the verifier finds in libraries: made for the purpose, for Linux and for Windows, on either system."""

import io
import shutil
import struct
import subprocess
import zipfile
import zlib

import pytest
from _helpers.wheel_forge import CPU, CUDA, CUDA_DLL, fat_binary, forge, link, zig  # first: it may skip this module

# isort: split
import pefile
import zstandard
from elftools.elf.elffile import ELFFile
from wheel_check import fatbin, limits, verify
from wheel_check.libraries import read_elf

pytestmark = pytest.mark.slow
TARGETS = ["75-real", "90a-real", "120-real", "120-virtual"]

CALL = "void {0}(void); API void mamba_f(void) {{ {0}(); }}"
TORCH = "_ZN3c104cuda14ExchangeDeviceEa"
WEAK = "__attribute__((weak)) void omp_x(void); API void mamba_f(void) { omp_x(); }"
UNDEFINED = ["-Wl,-z,undefs"]
LEAK = "API const char* mamba_f(void) {{ return {0}; }}"

# code, the linker's flags -> the only problem
LINUX = {
    "symbol of torch": (CALL.format(TORCH), UNDEFINED, f"has the undefined symbol {TORCH} of torch, Python, OpenMP"),
    "symbol of Python": (CALL.format("PyErr_Clear"), UNDEFINED, "has the undefined symbol PyErr_Clear of torch"),
    "any other symbol": (CALL.format("helper"), UNDEFINED, "has the undefined symbol helper"),
    "weak symbol": (WEAK, UNDEFINED, "has the undefined symbol omp_x of torch"),
    "search path": ("", ["-Wl,-rpath,$ORIGIN/../torch/lib"], "looks for libraries in $ORIGIN/../torch/lib"),
    "folder of the build": (LEAK.format('"/opt/agent/scan.cu"'), [], "holds '/opt/agent', of the machine that built"),
    "compiler's file": (LEAK.format('"tmpxft_00001234_00000000-7"'), [], "holds 'tmpxft_00001234'"),
}
WINDOWS = {
    "folder of the build": (LEAK.format(r'"D:\\agent\\work\\scan.cu"'), "of the machine that built it"),
    "foreign export": ("API void helper(void) {}", "exports helper, which is not of the C ABI"),
}


def problems_of(wheel, tmp_path, name, library):
    return verify(forge(wheel, tmp_path, {name: library}))


@pytest.mark.parametrize("case", LINUX)
def test_linux(real_wheel, libraries, tmp_path, case):
    code, flags, reason = LINUX[case]
    problems = problems_of(real_wheel, tmp_path, CPU, libraries.make(code, *flags))
    assert [problem for problem in problems if not problem.startswith(f"{CPU}: {reason}")] == []
    assert problems


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(windows_wheel, libraries, tmp_path, case):
    code, reason = WINDOWS[case]
    library = libraries.make(code, windows=True, section=fat_binary(*TARGETS))
    (problem,) = problems_of(windows_wheel, tmp_path, CUDA_DLL, library)
    assert problem.startswith(CUDA_DLL)
    assert reason in problem


def test_headers_that_are_not_ours(real_wheel, windows_wheel, libraries, tmp_path):
    elf = bytearray(libraries.make())
    elf[18:20] = struct.pack("<H", 183)  # e_machine
    assert f"{CPU}: is no x86-64 shared library but EM_AARCH64 ET_DYN" in problems_of(real_wheel, tmp_path, CPU, elf)
    stack = bytearray(libraries.make())
    start, size, count = *struct.unpack_from("<Q", stack, 32), *struct.unpack_from("<HH", stack, 54)
    for at in range(start, start + size * count, size):
        if struct.unpack_from("<I", stack, at) == (0x6474E551,):  # PT_GNU_STACK
            struct.pack_into("<I", stack, at + 4, 7)
    assert f"{CPU}: asks for an executable stack" in problems_of(real_wheel, tmp_path, CPU, stack)

    dll = libraries.make(windows=True, section=fat_binary(*TARGETS))
    fixed = pefile.PE(data=dll)
    fixed.FILE_HEADER.Machine = 0xAA64
    fixed.OPTIONAL_HEADER.DllCharacteristics = 0
    problems = problems_of(windows_wheel, tmp_path, CUDA_DLL, fixed.write())
    assert f"{CUDA_DLL}: is no x86-64 DLL (machine 0xaa64)" in problems
    assert f"{CUDA_DLL}: was linked without /DYNAMICBASE" in problems


def needing(libraries, folder, name, version):
    """A library that calls f, which is in the library `name` with that symbol version."""
    (folder / "f.c").write_text("int f(void) { return 0; }\n")
    (folder / "f.map").write_text(f"{version} {{ global: f; }};\n")
    link(folder, "f.c", f"-Wl,-soname,{name}", "-Wl,--version-script=f.map", output=name)
    return libraries.make("int f(void); API int mamba_f(void) { return f(); }", str(folder / name))


@pytest.mark.parametrize(
    ("name", "version", "reason"),
    [
        ("libc10.so", "C10", "needs libc10.so, which is no library of the system"),
        ("libcudart.so.13", "V", "needs libcudart.so.13, which is no library of the system"),
        ("libc.so.6", "GLIBC_2.29", "needs GLIBC_2.29, which a manylinux_2_28 system need not have"),
        ("libstdc++.so.6", "GLIBCXX_3.4.25", "needs GLIBCXX_3.4.25, which a manylinux_2_28 system need not have"),
        ("libc.so.6", "GLIBC_PRIVATE", "needs GLIBC_PRIVATE, which a manylinux_2_28 system need not have"),
        ("libc.so.6", "GLIBC_2.28", None),
        ("libgcc_s.so.1", "GCC_4.7.0", None),
    ],
)
def test_what_a_linux_library_needs(real_wheel, libraries, tmp_path, name, version, reason):
    problems = problems_of(real_wheel, tmp_path, CPU, needing(libraries, tmp_path, name, version))
    if reason:
        assert f"{CPU}: {reason}" in problems
    else:
        assert problems == []


def test_plain_linux_wheel_has_no_ceiling(real_wheel, libraries, tmp_path):
    library = needing(libraries, tmp_path, "libc.so.6", "GLIBC_2.39")
    name = real_wheel.name.replace("manylinux_2_28", "linux")
    tag = {"WHEEL": lambda old: old.replace(b"manylinux_2_28", b"linux")}
    assert verify(forge(real_wheel, tmp_path, {CPU: library, **tag}, name=name)) == []


@pytest.mark.parametrize("dll", ["c10.dll", "python312.dll", "vcruntime140.dll"])
def test_dll_that_windows_does_not_have_is_refused(windows_wheel, libraries, tmp_path, dll):
    (tmp_path / "x.def").write_text(f"LIBRARY {dll}\nEXPORTS\n  their_f\n")
    zig("dlltool", "-m", "i386:x86-64", "-d", "x.def", "-l", "x.lib", folder=tmp_path)
    code = "__declspec(dllimport) int their_f(void); API int mamba_f(void) { return their_f(); }"
    library = libraries.make(code, str(tmp_path / "x.lib"), windows=True, section=fat_binary(*TARGETS))
    needs = f"{CUDA_DLL}: needs {dll}, which is no library of the system"
    assert needs in problems_of(windows_wheel, tmp_path, CUDA_DLL, library)


def test_what_windows_and_the_cuda_runtime_bring_is_accepted(windows_wheel, libraries, tmp_path):
    (tmp_path / "x.def").write_text("LIBRARY msvcrt.dll\nEXPORTS\n  their_f\n")  # what mingw-w64 links with
    zig("dlltool", "-m", "i386:x86-64", "-d", "x.def", "-l", "x.lib", folder=tmp_path)
    code = "__declspec(dllimport) int their_f(void); API int mamba_f(void) { return their_f(); }"
    code += " API int NvOptimusEnablementCuda = 1;"  # of cudart_static.lib
    library = libraries.make(code, str(tmp_path / "x.lib"), windows=True, section=fat_binary(*TARGETS))
    assert problems_of(windows_wheel, tmp_path, CUDA_DLL, library) == []


def test_library_of_another_version_is_refused(real_wheel, windows_wheel, libraries, tmp_path):
    missing = libraries.functions[0]
    reason = f"does not export {missing}, which mamba_ssm/_native/abi.py declares"
    library = libraries.make(leave_out=[missing])
    assert f"{CPU}: {reason}" in problems_of(real_wheel, tmp_path, CPU, library)
    library = libraries.make(leave_out=[missing], windows=True, section=fat_binary(*TARGETS))
    assert f"{CUDA_DLL}: {reason}" in problems_of(windows_wheel, tmp_path, CUDA_DLL, library)


def test_libraries_of_the_other_system_are_refused(real_wheel, windows_wheel, libraries, tmp_path):
    linux, windows = libraries.make(), libraries.make(windows=True)
    assert f"{CPU}: is no library that could be read" in problems_of(real_wheel, tmp_path, CPU, windows)[0]
    assert f"{CUDA_DLL}: is no library that could be read" in problems_of(windows_wheel, tmp_path, CUDA_DLL, linux)[0]


# ---- device code -----------------------------------------------------------------------------------------------------

DEVICE_CODE = {
    "none": (b"", "holds no device code"),
    "one less": (fat_binary(*TARGETS[1:]), "device code for 120-real 120-virtual 90a-real, and build_info.json says"),
    "one more": (fat_binary(*TARGETS, "86-real"), "device code for 120-real 120-virtual 75-real 86-real 90a-real, and"),
    "other suffix": (fat_binary("75-real", "90-real", "120-real", "120-virtual"), " 90-real, and build_info.json says"),
    "one source without": (fat_binary(*TARGETS) + fat_binary("75-real"), "holds device code for 75-real, and"),
    "cut short": (fat_binary(*TARGETS)[:-8], "its device code cannot be read"),
    "unknown kind": (fat_binary("75-lto"), "its device code cannot be read"),
    "no fat binary": (b"GPU" * 16, "its device code cannot be read"),
    "folder in it": (fat_binary(*TARGETS, code=b"\0/home/someone/scan.cu\0"), "holds '/home/someone', of the machine"),
    "folder, not compressed": (fat_binary(*TARGETS, code=b"\0/root/csrc/\0", compressed=False), "holds '/root/csrc'"),
    "folders without end": (  # a regular expression keeps a mark for each
        fat_binary(*TARGETS, code=b"\0C:\\" + b"aa\\" * 40 + b"bb\0"),
        "holds " + repr("C:\\" + "aa\\" * 30 + "aa") + ", of the machine",
    ),
}


@pytest.mark.parametrize("case", DEVICE_CODE)
def test_device_code(cuda_wheel, libraries, tmp_path, case):
    section, reason = DEVICE_CODE[case]
    problems = problems_of(cuda_wheel, tmp_path, CUDA, libraries.make(section=section))
    assert any(problem.startswith(CUDA) and reason in problem for problem in problems), problems


def test_device_code_that_would_fill_the_memory(cuda_wheel, libraries, tmp_path, monkeypatch):
    """Nothing of it is uncompressed: what the entries tell of their sizes is added up first."""
    monkeypatch.setattr("zstandard.ZstdDecompressor", None)
    one, all_of_it = limits.DEVICE_CODE_OF_A_SOURCE, limits.DEVICE_CODE
    for section, size, most in (
        (fat_binary(*TARGETS, code=bytes(one + 1)), one + 1, one),
        (fat_binary("90-real", code=bytes(one)) * (all_of_it // one + 1), all_of_it + one, all_of_it),
    ):
        problems = problems_of(cuda_wheel, tmp_path, CUDA, libraries.make(section=section))
        assert any(f"would unpack to {size} bytes, and may to {most}" in problem for problem in problems), problems


def test_device_code_that_hides_its_size(cuda_wheel, libraries, tmp_path):
    data = zstandard.compress(bytes(1 << 20))
    entry = struct.pack("<HHIQI8xI8xQ8xQ", 2, 0x101, 64, len(data), len(data), 75, 0x11, 100) + data
    section = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
    problems = problems_of(cuda_wheel, tmp_path, CUDA, libraries.make(section=section + bytes(-len(section) % 8)))
    assert any("its code has another size than the 100 bytes that it tells" in problem for problem in problems), (
        problems
    )


# section of the CPU library, field of its header, new value of it -> the reason
TYPE, FLAGS, SIZE, COUNT = (4, "<I"), (8, "<Q"), (32, "<Q"), (44, "<I")
NOBITS, COMPRESSED = 8, 1 << 11
HEADERS = {
    "symbols without end": (".dynsym", SIZE, 24 << 36, "its section .dynsym ends behind the file's end"),
    "tags without end": (".dynamic", SIZE, 1 << 40, "its section .dynamic ends behind the file's end"),
    "tags that are not in the file": (".dynamic", TYPE, NOBITS, "its section .dynamic is of type SHT_NOBITS, not"),
    "compressed symbols": (".dynsym", FLAGS, COMPRESSED | 2, "its section .dynsym is compressed"),
    "compressed versions": (".gnu.version", FLAGS, COMPRESSED | 2, "its section .gnu.version is compressed"),
}


def with_header(data, section, field, value):
    """The library with a field of a section's header changed."""
    changed, elf, (at, kind) = bytearray(data), ELFFile(io.BytesIO(data)), field
    struct.pack_into(kind, changed, elf["e_shoff"] + elf["e_shentsize"] * elf.get_section_index(section) + at, value)
    return bytes(changed)


@pytest.fixture(scope="module")
def cpu_library(real_wheel):
    with zipfile.ZipFile(real_wheel) as archive:
        return archive.read(CPU)


@pytest.mark.parametrize("case", HEADERS)
def test_section_that_no_linker_writes(real_wheel, cpu_library, tmp_path, case):
    *change, reason = HEADERS[case]
    problems = problems_of(real_wheel, tmp_path, CPU, with_header(cpu_library, *change))
    assert any(reason in problem for problem in problems), problems


@pytest.mark.parametrize("change", [(TYPE, NOBITS), (FLAGS, COMPRESSED)], ids=["not in the file", "compressed"])
def test_device_code_that_is_not_in_the_file(cuda_wheel, libraries, tmp_path, change):
    """It tells of 64 GiB, which no reader is to make."""
    library = libraries.make(section=struct.pack("<LLQQ", 1, 0, 1 << 36, 1) + zlib.compress(bytes(1 << 20)))
    for field, value in (change, (SIZE, 1 << 36)):
        library = with_header(library, ".nv_fatbin", field, value)
    problems = problems_of(cuda_wheel, tmp_path, CUDA, library)
    assert any("its section .nv_fatbin is" in problem for problem in problems), problems


def test_tables_without_end(real_wheel, cpu_library, tmp_path):
    """The first version is its own next, four billion times."""
    library = bytearray(with_header(cpu_library, ".gnu.version_r", COUNT, 0xFFFFFFFF))
    at = ELFFile(io.BytesIO(cpu_library)).get_section_by_name(".gnu.version_r")["sh_offset"]
    struct.pack_into("<I", library, at + 12, 0)  # vn_next
    problems = problems_of(real_wheel, tmp_path, CPU, bytes(library))
    assert any("its tables are endless" in problem for problem in problems), problems


def test_cpu_library_holds_no_device_code(real_wheel, libraries, tmp_path):
    library = libraries.make(section=fat_binary("90-real"))
    assert problems_of(real_wheel, tmp_path, CPU, libraries.make()) == []
    assert any("bytes of device code" in problem for problem in problems_of(real_wheel, tmp_path, CPU, library))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_what_nvcc_writes_is_read(tmp_path):
    """One file with a kernel and one without, for machine code, PTX and an architecture-specific target."""
    wanted = {"sm_75": "75-real", "sm_90a": "90a-real", "sm_120": "120-real", "compute_120": "120-virtual"}
    (tmp_path / "kernel.cu").write_text("__global__ void k(float* p) { p[threadIdx.x] += 1; }\n")
    (tmp_path / "host.cu").write_text("int f() { return 0; }\n")
    targets = [f"-gencode=arch={code.replace('sm', 'compute')},code={code}" for code in wanted]
    for name in ("kernel", "host"):
        command = ["nvcc", "-c", "-Xcompiler=-fPIC", *targets, f"{name}.cu", "-o", f"{name}.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
    library = link(tmp_path, *UNDEFINED, "kernel.o", "host.o")
    containers = fatbin.containers(read_elf(library.read_bytes()).device_code)
    assert len(containers) == 2
    for container in containers:
        assert {entry.target for entry in container} == set(wanted.values())
