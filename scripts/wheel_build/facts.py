"""What this machine is and holds. The only module here that looks; all that decide take its Facts as an argument."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform as platform_module
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import cuda, msvc
from .config import Config

GIB = 1 << 30
NOTHING = cuda.Discovery(None)


@dataclass(frozen=True)
class Tool:
    path: str
    version: str = ""
    target: str = ""  # x64, x86 or ARM64, as cl says

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


@dataclass(frozen=True)
class Facts:
    platform: str  # sys.platform
    machine: str
    cores: int
    memory: int | None  # free bytes, None where it cannot be told
    disk: int | None  # free bytes where the build writes
    writable: bool
    root: str
    compiler: Tool | None
    cmake: Tool | None
    ninja: Tool | None
    driver: str = ""  # NVIDIA driver's version, "present" where it does not say, "" without one
    gpus: tuple[int, ...] = ()  # compute capabilities, 86 for 8.6
    discovery: cuda.Discovery = NOTHING
    nvcc_version: tuple[int, int] | None = None
    nvcc_full_version: str = ""
    nvcc_architectures: tuple[int, ...] = ()
    nvcc_trouble: str = ""  # nvcc's words when it cannot compile for this host compiler
    nvcc_missing_parts: tuple[str, ...] = ()
    msc_ver_range: tuple[int, int] | None = None  # the cl that this nvcc takes
    cuda_flags: str = ""
    cuda_host: str = ""  # the host compiler to name to nvcc
    msvc: msvc.Discovery | None = None  # on Windows
    environment: Mapping[str, str] = field(default_factory=dict)  # to build in: the caller's, or vcvarsall's
    temp: str = ""
    libraries_in_use: tuple[str, ...] = ()
    torch: str = ""  # version of the torch beside this Python, which the build does not need
    torch_cuda: str = ""
    python: str = ""
    zig: Tool | None = None  # what release builds link with, and what then checks the wheel
    auditwheel: Tool | None = None


def ask(*command: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """(exit status, output and errors); (-1, "") when it cannot be run: a missing tool is a fact, not an exception."""
    return _ask(list(command), environ)


def _ask(command: list[str] | str, environ: Mapping[str, str] | None) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
    except (OSError, subprocess.SubprocessError):
        return -1, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")


def run(*command: str, environ: Mapping[str, str] | None = None) -> str:
    return ask(*command, environ=environ)[1]


def real_files() -> cuda.FileSystem:
    def list_folder(path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def read(path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    return cuda.FileSystem(os.path.isfile, list_folder, read)


def discover(environ: Mapping[str, str]) -> cuda.Discovery:
    return cuda.find_nvcc(environ, sys.platform, real_files(), sys.path)


def gather(root: Path, environ: Mapping[str, str], config: Config) -> Facts:
    """Looks at the machine. MAMBA_SSM_CUDA=off asks nothing of CUDA."""
    files, want_cuda = real_files(), config.cuda != "off"
    discovery = discover(environ) if want_cuda else NOTHING
    nvcc = discovery.nvcc
    studio, msc_ver_range = None, None
    if sys.platform == "win32":
        msc_ver_range = cuda.msc_ver_range(nvcc, files) if nvcc else None
        accepted = None if config.any_host_compiler else msc_ver_range
        studio, environ = visual_studio(environ, nvcc is not None, accepted)
    version, full_version, architectures, trouble, flags = None, "", [], "", ""
    if nvcc is not None:
        parsed = cuda.parse_nvcc_version(run(nvcc.path, "--version"))
        if parsed is None:
            trouble = f"{nvcc.path} --version does not answer as nvcc does"
        else:
            version, full_version = parsed
            architectures = cuda.parse_architectures(run(nvcc.path, "--list-gpu-arch"))
            trouble = host_compiler_trouble(nvcc.path, environ, config)
            flags = cuda.extra_cuda_flags(nvcc, sys.platform, files)
    torch, torch_cuda = installed_torch(files)
    return Facts(
        platform=sys.platform,
        machine=platform_module.machine(),
        cores=cores(),
        memory=free_memory(),
        disk=free_disk(root),
        writable=os.access(root, os.W_OK) and (not (root / "build").exists() or os.access(root / "build", os.W_OK)),
        root=str(root),
        compiler=host_compiler(environ),
        cmake=newest_enough("cmake", environ, (3, 26)),
        ninja=newest_enough("ninja", environ, (1, 0)),
        driver=driver_version() if want_cuda else "",
        gpus=tuple(compute_capabilities()) if "native" in config.arch_list.lower() else (),
        discovery=discovery,
        nvcc_version=version,
        nvcc_full_version=full_version,
        nvcc_architectures=tuple(architectures),
        nvcc_trouble=trouble,
        nvcc_missing_parts=tuple(cuda.missing_parts(nvcc, sys.platform, files)) if nvcc else (),
        msc_ver_range=msc_ver_range,
        cuda_flags=flags,
        cuda_host=cuda_host_compiler(environ),
        msvc=studio,
        environment=dict(environ),
        temp=tempfile.gettempdir(),
        libraries_in_use=tuple(libraries_in_use(root)),
        torch=torch,
        torch_cuda=torch_cuda,
        python=platform_module.python_version(),
        zig=zig(),
        auditwheel=auditwheel(),
    )


def visual_studio(
    environ: Mapping[str, str], cuda_on: bool, accepted: tuple[int, int] | None
) -> tuple[msvc.Discovery, Mapping[str, str]]:
    """The compiler found and the environment to build in. The only place that runs vswhere and vcvarsall."""
    files, listed = real_files(), ""
    environ = {name.upper(): value for name, value in environ.items()}
    if msvc.needs_vswhere(environ, files):
        vswhere = msvc.vswhere_path(environ, files)
        listed = run(vswhere, *msvc.VSWHERE_ARGUMENTS) if vswhere else ""
    found = msvc.discover(environ, files, listed, cuda_on, accepted)
    if found.toolset is None:
        return found, environ
    _, said = _ask(msvc.vcvarsall_command(found.toolset, sys.executable), msvc.environment_for_vcvarsall(environ))
    variables, trouble = msvc.parse_environment(said, files)
    if trouble:
        return replace(found, problem="vcvarsall-failed", detail=trouble), environ
    return found, variables


def newest_enough(name: str, environ: Mapping[str, str], oldest: tuple[int, ...]) -> Tool | None:
    """The first such tool beside this Python or on PATH that is new enough; else the first found, for the message."""
    folders = [
        os.path.dirname(sys.executable),
        sysconfig.get_path("scripts"),
        *environ.get("PATH", os.defpath).split(os.pathsep),
    ]
    found = []
    for folder in dict.fromkeys(folder for folder in folders if folder):
        path = shutil.which(name, path=folder)
        if path:
            match = re.search(r"\d+(\.\d+)+", run(path, "--version"))
            if match:
                found.append(Tool(path, match.group(0)))
                if found[-1].numbers >= oldest:
                    return found[-1]
    return found[0] if found else None


def host_compiler(environ: Mapping[str, str]) -> Tool | None:
    """The C++ compiler that CMake will take: CXX, else the platform's usual names."""
    chosen = environ.get("CXX", "").strip()
    if chosen:
        # CXX may be "ccache g++", or one path with spaces in it.
        words = [chosen] if os.path.isfile(chosen) else shlex.split(chosen, posix=sys.platform != "win32")
        names = [[word.strip('"') for word in words]]
    elif sys.platform == "win32":
        names = [["cl"]]
    else:
        names = [["c++"], ["g++"], ["clang++"]]
    for command in names:
        path = shutil.which(command[0], path=environ.get("PATH"))
        if path:
            # cl has no --version: it says who it is when called without arguments.
            is_cl = re.fullmatch(r"cl(\.exe)?", os.path.basename(path), re.IGNORECASE)
            text = run(path, *command[1:], *([] if is_cl else ["--version"]), environ=environ)
            version = re.search(r"\d+(\.\d+)+", text)
            target = re.search(r"\b(x64|x86|ARM64|ARM)\s*$", text, re.MULTILINE) if is_cl else None
            return Tool(
                " ".join([path, *command[1:]]),
                version.group(0) if version else "",
                target.group(1) if target else "",
            )
    return None


def zig() -> Tool | None:
    """The zig of the ziglang package in this Python."""
    package = importlib.util.find_spec("ziglang")
    folder = os.path.dirname(package.origin) if package and package.origin else ""
    path = shutil.which("zig", path=folder) if folder else None
    return Tool(path, run(path, "version").strip()) if path else None


def auditwheel() -> Tool | None:
    """auditwheel as a module of this Python; its version is of the package, which is not imported for it."""
    package = importlib.util.find_spec("auditwheel")
    return Tool(package.origin or "", importlib.metadata.version("auditwheel")) if package else None


def host_compiler_trouble(nvcc: str, environ: Mapping[str, str], config: Config) -> str:
    """Asks nvcc to preprocess nothing: its header refuses host compilers that it does not support, in words."""
    if sys.platform == "win32":
        return ""  # the header is read instead: msc_ver_range
    command = [nvcc, "-E", "-x", "cu", os.devnull, "-o", os.devnull]
    host = cuda_host_compiler(environ)
    if host:
        command[1:1] = ["-ccbin", host]
    if config.any_host_compiler:
        command[1:1] = ["-allow-unsupported-compiler"]
    status, text = ask(*command)
    if status == 0:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit status {status}")


def cuda_host_compiler(environ: Mapping[str, str]) -> str:
    """The host compiler for nvcc: CUDAHOSTCXX, else CXX where that is one program; "" leaves nvcc its own choice.

    On Windows nvcc takes cl only, or the folder it lies in, whatever CXX is.
    """
    chosen = environ.get("CUDAHOSTCXX", "").strip().strip('"')
    if not chosen and sys.platform != "win32":
        chosen = environ.get("CXX", "").strip()
    if sys.platform == "win32" and os.path.isdir(chosen):
        return chosen
    return chosen if chosen and shutil.which(chosen, path=environ.get("PATH")) else ""


def libraries_in_use(root: Path) -> list[str]:
    """Built DLLs that a running Python has loaded: Windows lets nobody write those."""
    found = []
    if sys.platform == "win32":
        for path in (*root.glob("mamba_ssm/lib/*.dll"), *root.glob("build/native-*/lib/*.dll")):
            try:
                with open(path, "r+b"):
                    pass
            except OSError:
                found.append(str(path))
    return found


def installed_torch(files: cuda.FileSystem) -> tuple[str, str]:
    """(torch's version, its CUDA's or "") by its version.py: importing it takes seconds, and the build needs none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        text = files.read(os.path.join(folder, "version.py"))
        version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
        cuda_version = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
        if version:
            return version.group(1), cuda_version.group(1) if cuda_version else ""
    return "", ""


def cores() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, count)


def free_memory() -> int | None:
    if sys.platform == "win32":
        return _free_memory_windows()
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = int(match.group(1)) * 1024 if match else None
    except OSError:
        return None
    try:  # a container's limit; its page cache counts as used there, but is given back
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            stat = Path("/sys/fs/cgroup/memory.stat").read_text()
            cache = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
            left = int(limit) - used + (int(cache.group(1)) if cache else 0)
            free = min(free, left) if free is not None else left
    except (OSError, ValueError):
        pass
    return free


def _free_memory_windows() -> int | None:
    class MemoryStatus(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("available", ctypes.c_uint64),
            ("rest", ctypes.c_uint64 * 5),
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ok = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.available) if ok else None


def free_disk(root: Path) -> int | None:
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return None


def driver_version() -> str:
    """The NVIDIA driver's version, "present" where it is there but does not say, "" without one."""
    if sys.platform == "win32":
        system = os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "nvcuda.dll")
        return "present" if os.path.isfile(system) else ""
    try:
        match = re.search(r"(\d+\.\d+(\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
        return match.group(1) if match else "present"
    except OSError:
        pass
    # Under WSL the driver is Windows' own, and /proc does not show it.
    return "present" if os.path.exists("/usr/lib/wsl/lib/libcuda.so.1") or os.path.exists("/dev/nvidiactl") else ""


def compute_capabilities() -> list[int]:
    """Of the GPUs present, asked of the driver's own library."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return []
    count, found = ctypes.c_int(), set()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        # 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
        if (
            library.cuDeviceGet(ctypes.byref(device), index) == 0
            and library.cuDeviceGetAttribute(ctypes.byref(major), 75, device) == 0
            and library.cuDeviceGetAttribute(ctypes.byref(minor), 76, device) == 0
        ):
            found.add(major.value * 10 + minor.value)
    return sorted(found)


def git_state(root: Path) -> tuple[str, int, bool]:
    """(commit, its time, tracked files changed); ("", 0, False) outside a checkout of this very folder."""
    top = run("git", "-C", str(root), "rev-parse", "--show-toplevel").strip()
    if not top or os.path.realpath(top) != os.path.realpath(root):
        return "", 0, False
    head = re.fullmatch(r"([0-9a-f]{40,64}) (\d+)", run("git", "-C", str(root), "log", "-1", "--format=%H %ct").strip())
    if head is None:
        return "", 0, False
    changed = run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip()
    return head.group(1), int(head.group(2)), bool(changed)
