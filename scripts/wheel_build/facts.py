"""What this machine is and holds. Only this module and tools.py look; all that decide take Facts as an argument."""

from __future__ import annotations

import ctypes
import os
import platform as platform_module
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import cuda, msvc, tools
from .config import read_config
from .tools import Tool, run

GIB = 1 << 30
NOTHING = cuda.Discovery(None)


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


def gather(root: Path, environ: Mapping[str, str], in_place: bool = False) -> Facts:
    """Looks at the machine. MAMBA_SSM_CUDA=off asks nothing of CUDA; in_place (an editable install) asks for GPUs."""
    files, config = tools.real_files(), read_config(environ)
    want_cuda = config.cuda != "off"
    want_gpus = want_cuda and (in_place or "native" in config.arch_list.lower())
    discovery = tools.discover(environ) if want_cuda else NOTHING
    nvcc = discovery.nvcc
    studio, msc_ver_range = None, None
    if sys.platform == "win32":
        msc_ver_range = cuda.msc_ver_range(nvcc, files) if nvcc else None
        accepted = None if config.any_host_compiler else msc_ver_range
        studio, environ = tools.visual_studio(environ, nvcc is not None, accepted)
    version, full_version, architectures, trouble, flags = None, "", [], "", ""
    if nvcc is not None:
        said = run(nvcc.path, "--version")
        parsed = cuda.parse_nvcc_version(said)
        if parsed is None:
            trouble = not_as_nvcc(nvcc.path, "--version", said)
        else:
            version, full_version = parsed
            said = run(nvcc.path, "--list-gpu-arch")
            architectures = cuda.parse_architectures(said)
            trouble = tools.host_compiler_trouble(nvcc.path, environ, config)
            if not architectures:
                version, trouble = None, not_as_nvcc(nvcc.path, "--list-gpu-arch", said)
            flags = cuda.extra_cuda_flags(nvcc, sys.platform, files)
    torch, torch_cuda = tools.installed_torch(files)
    return Facts(
        platform=sys.platform,
        machine=platform_module.machine(),
        cores=cores(),
        memory=free_memory(),
        disk=free_disk(root / "build" if (root / "build").is_dir() else root),
        writable=os.access(root, os.W_OK) and (not (root / "build").exists() or os.access(root / "build", os.W_OK)),
        root=str(root),
        compiler=tools.host_compiler(environ),
        cmake=tools.newest_enough("cmake", environ, (3, 26)),
        ninja=tools.newest_enough("ninja", environ, (1, 0)),
        driver=driver_version() if want_cuda else "",
        gpus=tuple(compute_capabilities()) if want_gpus else (),
        discovery=discovery,
        nvcc_version=version,
        nvcc_full_version=full_version,
        nvcc_architectures=tuple(architectures),
        nvcc_trouble=trouble,
        nvcc_missing_parts=tuple(cuda.missing_parts(nvcc, sys.platform, files)) if nvcc else (),
        msc_ver_range=msc_ver_range,
        cuda_flags=flags,
        cuda_host=tools.cuda_host_compiler(environ),
        msvc=studio,
        environment=dict(environ),
        temp=tempfile.gettempdir(),
        libraries_in_use=tuple(libraries_in_use(root)),
        torch=torch,
        torch_cuda=torch_cuda,
        python=platform_module.python_version(),
        zig=tools.zig(),
        auditwheel=tools.auditwheel(),
    )


def not_as_nvcc(path: str, option: str, said: str) -> str:
    words = said.strip().splitlines()[:1] or ["nothing"]
    return f"{path} {option} does not answer as nvcc does; it says: {words[0].strip()}"


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
    here = os.path.realpath(root)
    # In a container the checkout often is another user's, and git then answers nothing. This very folder's code is
    # being run, so its git settings may be read.
    git = ("git", "-c", f"safe.directory={Path(here).as_posix()}", "-C", here)
    top = run(*git, "rev-parse", "--show-toplevel").strip()
    if not top or os.path.realpath(top) != here:
        return "", 0, False
    head = re.fullmatch(r"([0-9a-f]{40,64}) (\d+)", run(*git, "log", "-1", "--format=%H %ct").strip())
    if head is None:
        return "", 0, False
    changed = run(*git, "status", "--porcelain", "--untracked-files=no").strip()
    return head.group(1), int(head.group(2)), bool(changed)
