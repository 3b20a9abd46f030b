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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import cuda

GIB = 1 << 30
NOTHING = cuda.Discovery(None)


@dataclass(frozen=True)
class Tool:
    path: str
    version: str = ""

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
    cuda_flags: str = ""
    python: str = ""
    zig: Tool | None = None  # what release builds link with, and what then checks the wheel
    auditwheel: Tool | None = None


def ask(*command: str) -> tuple[int, str]:
    """(exit status, output and errors); (-1, "") when it cannot be run: a missing tool is a fact, not an exception."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
    except (OSError, subprocess.SubprocessError):
        return -1, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")


def run(*command: str) -> str:
    return ask(*command)[1]


def real_files() -> cuda.FileSystem:
    def list_folder(path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    return cuda.FileSystem(os.path.isfile, list_folder)


def discover(environ: Mapping[str, str]) -> cuda.Discovery:
    return cuda.find_nvcc(environ, sys.platform, real_files(), sys.path)


def gather(root: Path, environ: Mapping[str, str], want_cuda: bool = True, want_gpus: bool = False) -> Facts:
    """Looks at the machine. `want_cuda` False (MAMBA_SSM_CUDA=off) asks nothing of CUDA."""
    discovery = discover(environ) if want_cuda else NOTHING
    version, full_version, architectures, trouble, flags = None, "", [], "", ""
    if discovery.nvcc is not None:
        path = discovery.nvcc.path
        parsed = cuda.parse_nvcc_version(run(path, "--version"))
        if parsed is None:
            trouble = f"{path} --version does not answer as nvcc does"
        else:
            version, full_version = parsed
            architectures = cuda.parse_architectures(run(path, "--list-gpu-arch"))
            trouble = host_compiler_trouble(path, environ)
            flags = cuda.extra_cuda_flags(discovery.nvcc, sys.platform, real_files())
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
        gpus=tuple(compute_capabilities()) if want_gpus else (),
        discovery=discovery,
        nvcc_version=version,
        nvcc_full_version=full_version,
        nvcc_architectures=tuple(architectures),
        nvcc_trouble=trouble,
        cuda_flags=flags,
        python=platform_module.python_version(),
        zig=zig(),
        auditwheel=auditwheel(),
    )


def newest_enough(name: str, environ: Mapping[str, str], oldest: tuple[int, ...]) -> Tool | None:
    """The first such tool beside this Python or on PATH that is new enough; else the first found, for the message."""
    folders = [os.path.dirname(sys.executable), *environ.get("PATH", os.defpath).split(os.pathsep)]
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
        command = [chosen] if os.path.isfile(chosen) else shlex.split(chosen, posix=sys.platform != "win32")
        names = [command]
    elif sys.platform == "win32":
        names = [["cl"]]
    else:
        names = [["c++"], ["g++"], ["clang++"]]
    for command in names:
        path = shutil.which(command[0], path=environ.get("PATH"))
        if path:
            # cl has no --version: it says who it is when called without arguments.
            text = run(path) if sys.platform == "win32" else run(path, *command[1:], "--version")
            match = re.search(r"\d+(\.\d+)+", text)
            return Tool(" ".join([path, *command[1:]]), match.group(0) if match else "")
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


def host_compiler_trouble(nvcc: str, environ: Mapping[str, str]) -> str:
    """Asks nvcc to preprocess nothing: its header refuses host compilers that it does not support, in words."""
    if sys.platform == "win32":
        return ""  # nvcc finds cl only in a developer environment, which the build sets up later
    command = [nvcc, "-E", "-x", "cu", os.devnull, "-o", os.devnull]
    host = cuda_host_compiler(environ)
    if host:
        command[1:1] = ["-ccbin", host]
    status, text = ask(*command)
    if status == 0:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit status {status}")


def cuda_host_compiler(environ: Mapping[str, str]) -> str:
    """The host compiler for nvcc: CUDAHOSTCXX, else CXX where that is one program; "" leaves nvcc its own choice."""
    host = environ.get("CUDAHOSTCXX", "").strip() or environ.get("CXX", "").strip()
    return host if host and shutil.which(host, path=environ.get("PATH")) else ""


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
