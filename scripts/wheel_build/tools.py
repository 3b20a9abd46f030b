"""The programs of a build, looked for and asked: compilers, cmake, ninja, Visual Studio, nvcc, zig, torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import cuda, msvc
from .config import Config


@dataclass(frozen=True)
class Tool:
    path: str
    version: str = ""
    target: str = ""  # x64, x86 or ARM64, as cl says

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


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
        try:
            words = [chosen] if os.path.isfile(chosen) else shlex.split(chosen, posix=sys.platform != "win32")
        except ValueError:  # a quote that is not closed
            words = [chosen]
        names = [[word.strip('"') for word in words]]
    elif sys.platform == "win32":
        names = [["cl"]]
    else:
        names = [["c++"], ["g++"], ["clang++"]]
    for command in names:
        path = shutil.which(command[0], path=environ.get("PATH"))
        if path:
            # cl has no --version: it says who it is when called without arguments.
            is_cl = re.search(r"\\cl(\.exe)?$", path, re.IGNORECASE)
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
