"""The native libraries: what they need of the system, what they offer, which GPUs they hold code for."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

import pefile
from elftools.elf.constants import P_FLAGS, SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection
from elftools.elf.sections import Section

from . import fatbin
from .metadata import assigned
from .wheel import Wheel

# libc's own family and the C++ runtime; ld-linux is libc's loader, which thread-local storage refers to.
LINUX_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s)\.so\.\d+|ld-linux-x86-64\.so\.2")
# Of every Windows 10 and newer. Not vcruntime140.dll: the C++ runtime is linked statically.
WINDOWS_LIBRARIES = re.compile(
    r"(kernel32|user32|advapi32|ws2_32|ntdll|bcrypt|shell32|ole32|ucrtbase|msvcrt|api-ms-win-.*)\.dll"
)
# What pyelftools may read of a library's tables, and what a read costs besides its bytes: ours come to 0.3 MiB.
READING, EACH_READ = 16 << 20, 64
# The sections that are looked into, and the type that a linker gives each. Of other types, a reader makes up bytes.
SECTIONS = {
    ".dynamic": "SHT_DYNAMIC",
    ".dynstr": "SHT_STRTAB",
    ".dynsym": "SHT_DYNSYM",
    ".gnu.version": "SHT_GNU_versym",
    ".gnu.version_r": "SHT_GNU_verneed",
    ".nv_fatbin": "SHT_PROGBITS",
}
# Windows' cudart_static.lib has every DLL export it: laptops then prefer the NVIDIA GPU.
CUDART_EXPORTS = {"NvOptimusEnablementCuda"}
# Weak references that the compiler's start-up files make, and that nothing needs to answer.
START_UP = ("_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__")
FOREIGN = re.compile(r"_?Py[A-Z_]|_Z\w*?(2at|3c10|5torch)|THP|omp_|GOMP_|__kmpc_|cuda[A-Z]|cu[A-Z]")
# The newest symbol versions that a manylinux_2_28 system is sure to have (PEP 600; auditwheel's policy of that name).
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


@dataclass
class Library:
    """What is looked at, of either format."""

    needed: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)  # symbols that no needed library is said to have
    symbol_versions: list[str] = field(default_factory=list)  # GLIBC_2.17 and such
    device_code: bytes = b""
    problems: list[str] = field(default_factory=list)


def check_libraries(wheel: Wheel) -> list[str]:
    problems = []
    for name in wheel.libraries:
        if name in wheel.files:
            problems += [f"{name}: {problem}" for problem in check_library(wheel, name)]
    return problems


def check_library(wheel: Wheel, name: str) -> list[str]:
    read = read_dll if wheel.windows else read_elf
    try:
        library = read(wheel.files[name])
    # A parser on bytes that are no library, or half of one, may end in any exception.
    except Exception as error:
        return [f"is no library that could be read: {type(error).__name__}: {error}"]
    problems = list(library.problems)
    known = WINDOWS_LIBRARIES if wheel.windows else LINUX_LIBRARIES
    for needed in library.needed:
        if not known.fullmatch(needed.lower() if wheel.windows else needed):
            problems.append(f"needs {needed}, which is no library of the system")
    for symbol in library.unanswered:
        whose = " of torch, Python, OpenMP or CUDA" if FOREIGN.match(symbol) else ""
        problems.append(f"has the undefined symbol {symbol}{whose}")
    for symbol in library.exported:
        if not symbol.startswith("mamba_") and not (wheel.windows and symbol in CUDART_EXPORTS):
            problems.append(f"exports {symbol}, which is not of the C ABI")
    for function in bound_functions(wheel):
        if function not in library.exported:
            problems.append(f"does not export {function}, which mamba_ssm/_native/abi.py declares")
    if "manylinux_2_28" in wheel.tag:
        problems += above_ceiling(library.symbol_versions)
    return problems + check_architectures(wheel, name, library.device_code)


def bound_functions(wheel: Wheel) -> list[str]:
    return [f"mamba_{name}" for name in assigned(wheel, "mamba_ssm/_native/abi.py", "FUNCTIONS")]


def above_ceiling(symbol_versions: list[str]) -> list[str]:
    """The symbol versions that a system of glibc 2.28 lacks."""
    problems = []
    for version in symbol_versions:
        family, _, number = version.partition("_")
        numbers = tuple(int(part) for part in number.split(".")) if re.fullmatch(r"[\d.]+", number) else None
        if family not in MANYLINUX_2_28 or numbers is None or numbers > MANYLINUX_2_28[family]:
            problems.append(f"needs {version}, which a manylinux_2_28 system need not have")
    return problems


def check_architectures(wheel: Wheel, name: str, section: bytes) -> list[str]:
    """Each source's device code is there for exactly the architectures of build_info.json."""
    if "mamba_cuda" not in name:
        return [f"holds {len(section)} bytes of device code"] if section else []
    expected = sorted(wheel.build_info.get("architectures") or [])
    try:
        found = fatbin.containers(section)
    except Exception as error:
        return [f"its device code cannot be read: {type(error).__name__}: {error}"]
    if not found:
        return ["holds no device code"]
    sets = {tuple(sorted({entry.target for entry in container})) for container in found}
    return [
        f"holds device code for {' '.join(targets)}, and build_info.json says {' '.join(expected)}"
        for targets in sorted(sets)
        if list(targets) != expected
    ]


# ---- Linux -----------------------------------------------------------------------------------------------------------


class Reading(io.BytesIO):
    """A file for pyelftools, which follows every count and offset: some would keep it busy for days."""

    left = READING

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.left -= EACH_READ + len(data)
        if self.left < 0:
            raise ValueError(f"its tables are endless, or larger than the {READING >> 20} MiB that are read of them")
        return data


def read_elf(data: bytes) -> Library:
    elf, library = ELFFile(Reading(data)), Library()
    if elf.elfclass != 64 or elf["e_machine"] != "EM_X86_64" or elf["e_type"] != "ET_DYN":
        library.problems.append(f"is no x86-64 shared library but {elf['e_machine']} {elf['e_type']}")
    for segment in elf.iter_segments("PT_GNU_STACK"):
        if segment["p_flags"] & P_FLAGS.PF_X:
            library.problems.append("asks for an executable stack")
    sections = sections_of(elf, len(data))
    for tag in sections[".dynamic"].iter_tags():
        if tag.entry.d_tag == "DT_NEEDED":
            library.needed.append(tag.needed)
        elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            library.problems.append(
                f"looks for libraries in {getattr(tag, tag.entry.d_tag[3:].lower())} ({tag.entry.d_tag})"
            )
        elif tag.entry.d_tag == "DT_TEXTREL":
            library.problems.append("has text relocations")
    if ".gnu.version_r" in sections:
        versions = sections[".gnu.version_r"].iter_versions()
        library.symbol_versions = sorted({wanted.name for _, needs in versions for wanted in needs})
    for index, symbol in enumerate(sections[".dynsym"].iter_symbols()):
        if not symbol.name:
            continue
        if symbol["st_shndx"] != "SHN_UNDEF":
            library.exported.append(symbol.name)
        elif symbol.name not in START_UP and not has_version(sections.get(".gnu.version"), index):
            library.unanswered.append(symbol.name)
    if ".nv_fatbin" in sections:
        start, size = sections[".nv_fatbin"]["sh_offset"], sections[".nv_fatbin"]["sh_size"]
        library.device_code = data[start : start + size]
    return library


def sections_of(elf: ELFFile, size: int) -> dict[str, Section]:
    """Those of SECTIONS, each once, as bytes of the file, which has `size` of them. Raises ValueError."""
    found = {}
    for section in elf.iter_sections():
        name, kind = section.name, section["sh_type"]
        if name not in SECTIONS:
            continue
        if name in found:
            raise ValueError(f"it has two sections {name}")
        if kind != SECTIONS[name]:
            raise ValueError(f"its section {name} is of type {kind}, not {SECTIONS[name]}")
        if section["sh_flags"] & SH_FLAGS.SHF_COMPRESSED:
            raise ValueError(f"its section {name} is compressed")
        if section["sh_offset"] + section["sh_size"] > size:
            raise ValueError(f"its section {name} ends behind the file's end")
        found[name] = section
    for name in (".dynamic", ".dynsym"):
        if name not in found:
            raise ValueError(f"it has no section {name}")
    return found


def has_version(section: GNUVerSymSection | None, index: int) -> bool:
    """Whether a symbol names the version, and so the library, that it is to be found in."""
    return section is not None and section.get_symbol(index).entry["ndx"] not in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")


# ---- Windows ---------------------------------------------------------------------------------------------------------


def read_dll(data: bytes) -> Library:
    directory = pefile.DIRECTORY_ENTRY
    names = ("IMAGE_DIRECTORY_ENTRY_IMPORT", "IMAGE_DIRECTORY_ENTRY_DELAY_IMPORT", "IMAGE_DIRECTORY_ENTRY_EXPORT")
    pe, library = pefile.PE(data=data, fast_load=True), Library()
    pe.parse_data_directories([directory[name] for name in names])
    if not pe.is_dll() or pe.FILE_HEADER.Machine != pefile.MACHINE_TYPE["IMAGE_FILE_MACHINE_AMD64"]:
        library.problems.append(f"is no x86-64 DLL (machine {pe.FILE_HEADER.Machine:#x})")
    for switch in ("DYNAMIC_BASE", "NX_COMPAT"):
        if not getattr(pe.OPTIONAL_HEADER, f"IMAGE_DLLCHARACTERISTICS_{switch}"):
            library.problems.append(f"was linked without /{switch.replace('_', '')}")
    for imported in (*getattr(pe, "DIRECTORY_ENTRY_IMPORT", []), *getattr(pe, "DIRECTORY_ENTRY_DELAY_IMPORT", [])):
        library.needed.append(imported.dll.decode())
    exported = getattr(pe, "DIRECTORY_ENTRY_EXPORT", None)
    library.exported = [symbol.name.decode() for symbol in exported.symbols if symbol.name] if exported else []
    for section in pe.sections:
        if section.Name.rstrip(b"\0") == b".nv_fatb":  # PE cuts section names to eight characters
            library.device_code = section.get_data()[: section.Misc_VirtualSize]
    return library
