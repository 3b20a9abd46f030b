"""Where nvcc is: the environment's word, PATH, the usual folders, NVIDIA's wheels; and what its answers mean."""

from __future__ import annotations

import ntpath
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

OLDEST_NVCC = (12, 0)
# One 13.x minor, so that the parts fit each other. cccl holds <nv/target>, which CUDA's half-precision headers include.
NVCC_WHEELS = tuple(
    f"{name}==13.0.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
)
# Folders of those wheels below site-packages: CUDA 13 shares one, CUDA 12 has one a wheel.
WHEEL_FOLDERS = ("nvidia/cu13", "nvidia/cuda_nvcc")


@dataclass(frozen=True)
class Nvcc:
    path: str
    source: str  # where it was found: CUDACXX, CUDA_HOME, CUDA_PATH, PATH, folder or wheels

    def root(self, paths: ModuleType = posixpath) -> str:
        return paths.dirname(paths.dirname(self.path))


@dataclass(frozen=True)
class Discovery:
    nvcc: Nvcc | None
    wrong: tuple[tuple[str, str], ...] = ()  # (variable, value): set, but no nvcc there


@dataclass(frozen=True)
class FileSystem:
    """What discovery asks of a machine, so that tests can give a made-up one."""

    is_file: Callable[[str], bool]
    list_folder: Callable[[str], Sequence[str]]  # [] for a folder that is not there
    read: Callable[[str], str]  # "" for a file that is not there


def find_nvcc(environ: Mapping[str, str], platform: str, files: FileSystem, import_path: Iterable[str]) -> Discovery:
    """The first nvcc in the order CUDACXX, CUDA_HOME, CUDA_PATH, PATH, usual folders, wheels on `import_path`."""
    paths: ModuleType = ntpath if platform == "win32" else posixpath
    program = "nvcc.exe" if platform == "win32" else "nvcc"
    wrong: list[tuple[str, str]] = []

    compiler = environ.get("CUDACXX", "").strip()
    if compiler:
        found = find_program(compiler, environ, platform, files)
        if found:
            return Discovery(Nvcc(found, "CUDACXX"))
        # The user named one program: another one in its place would be a guess.
        return Discovery(None, (("CUDACXX", compiler),))

    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = environ.get(variable, "").strip()
        if home:
            candidate = paths.join(home, "bin", program)
            if files.is_file(candidate):
                return Discovery(Nvcc(candidate, variable), tuple(wrong))
            wrong.append((variable, home))

    found = find_program("nvcc", environ, platform, files)
    if found:
        return Discovery(Nvcc(found, "PATH"), tuple(wrong))

    for folder in usual_folders(environ, platform, files):
        candidate = paths.join(folder, "bin", program)
        if files.is_file(candidate):
            return Discovery(Nvcc(candidate, "folder"), tuple(wrong))

    for entry in import_path:
        for folder in WHEEL_FOLDERS:
            candidate = paths.join(entry, *folder.split("/"), "bin", program)
            if entry and files.is_file(candidate):
                return Discovery(Nvcc(candidate, "wheels"), tuple(wrong))
    return Discovery(None, tuple(wrong))


def usual_folders(environ: Mapping[str, str], platform: str, files: FileSystem) -> list[str]:
    """Where installers put CUDA, newest version first."""
    if platform == "win32":
        base = ntpath.join(environ.get("PROGRAMFILES", r"C:\Program Files"), "NVIDIA GPU Computing Toolkit", "CUDA")
        return [ntpath.join(base, name) for name in _newest_first(files.list_folder(base), r"v(\d+)\.(\d+)")]
    versions = _newest_first(files.list_folder("/usr/local"), r"cuda-(\d+)\.(\d+)")
    return ["/usr/local/cuda", *(f"/usr/local/{name}" for name in versions), "/opt/cuda", "/usr/lib/cuda"]


def _newest_first(names: Iterable[str], pattern: str) -> list[str]:
    matches = [match for match in (re.fullmatch(pattern, name) for name in names) if match]
    matches.sort(key=lambda match: (int(match.group(1)), int(match.group(2))), reverse=True)
    return [match.group(0) for match in matches]


def find_program(name: str, environ: Mapping[str, str], platform: str, files: FileSystem) -> str | None:
    """shutil.which over the given environment and file system."""
    paths: ModuleType = ntpath if platform == "win32" else posixpath
    names = [name]
    if platform == "win32" and not name.lower().endswith(".exe"):
        names = [f"{name}.exe"]
    if paths.dirname(name):
        return next((candidate for candidate in names if files.is_file(candidate)), None)
    for folder in environ.get("PATH", "").split(";" if platform == "win32" else ":"):
        folder = folder.strip('"') if platform == "win32" else folder
        for candidate in names:
            if folder and files.is_file(paths.join(folder, candidate)):
                return paths.join(folder, candidate)
    return None


def parse_nvcc_version(text: str) -> tuple[tuple[int, int], str] | None:
    """((13, 0), "13.0.88") from the output of `nvcc --version`."""
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
    return ((int(match.group(1)), int(match.group(2))), match.group(3)) if match else None


def parse_architectures(text: str) -> list[int]:
    """[75, 80, ...] from the output of `nvcc --list-gpu-arch`."""
    return sorted({int(number) for number in re.findall(r"^compute_(\d+)$", text, re.MULTILINE)})


def msc_ver_range(nvcc: Nvcc, files: FileSystem) -> tuple[int, int] | None:
    """(first, first no more) _MSC_VER that this nvcc's header lets pass on Windows; None where it does not say."""
    text = files.read(ntpath.join(nvcc.root(ntpath), "include", "crt", "host_config.h"))
    match = re.search(r"^#if _MSC_VER < (\d+) \|\| _MSC_VER >= (\d+)", text, re.MULTILINE)
    return (int(match.group(1)), int(match.group(2))) if match else None


# What nvcc needs to compile and link these kernels, below the toolkit's root; alternatives by who packed it.
PARTS_WINDOWS = {
    "the compiler's front end": (r"bin\cudafe++.exe",),
    "the device compiler": (r"nvvm\bin\cicc.exe",),
    "the assembler": (r"bin\ptxas.exe",),
    "the runtime's headers": (r"include\cuda_runtime.h",),
    "the half-precision headers": (r"include\cuda_fp16.h",),
    "the CCCL headers": (r"include\nv\target", r"include\cccl\nv\target"),
    "the static runtime": (r"lib\x64\cudart_static.lib", r"lib\cudart_static.lib"),
}


def missing_parts(nvcc: Nvcc, platform: str, files: FileSystem) -> list[str]:
    """Parts of the toolkit that are not there. Only Windows has one layout; elsewhere nvcc's own trial tells."""
    if platform != "win32":
        return []
    root = nvcc.root(ntpath)
    return [
        f"{name} ({places[0]})"
        for name, places in PARTS_WINDOWS.items()
        if not any(files.is_file(ntpath.join(root, place)) for place in places)
    ]


def extra_cuda_flags(nvcc: Nvcc, platform: str, files: FileSystem) -> str:
    """NVIDIA's wheels hold libraries in lib, where CMake looks in lib64 and targets only."""
    root = nvcc.root(ntpath if platform == "win32" else posixpath)
    only_lib = files.is_file(f"{root}/lib/libcudart_static.a") and not files.is_file(f"{root}/lib64/libcudart_static.a")
    return f"-L{root}/lib" if only_lib and platform != "win32" else ""


def requirements(cuda: str, nvcc: Nvcc | None) -> list[str]:
    """What a build needs from PyPI besides pyproject's list: nvcc itself, when it is asked for and not there."""
    return list(NVCC_WHEELS) if cuda == "on" and nvcc is None else []
