"""What the gate needs, fetched and built once: Debian packages, NVIDIA's Windows wheels, a Wine prefix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .compilers import TARGET, msvc_folder, wine_environment

HERE = Path(__file__).resolve().parent
OLDEST_CLANG = 18
MINGW = "x86_64-w64-mingw32"
MINGW_PACKAGE = "g++-mingw-w64-x86-64-posix"  # "posix": the variant that has std::thread
# nvcc.exe, cicc.exe and ptxas.exe, headers, cudart_static.lib. cuda_fp16.h includes <nv/target>, which is in CCCL.
WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
DEFAULT_CUDA = "13.0"


class GateError(Exception):
    """A stage of the gate failed; the message says which and why."""


class NotPossible(GateError):
    """The gate cannot run on this machine at all: no Debian packages to be had."""


def newest_clang(folders: list[str]) -> str | None:
    """Of /usr/lib/llvm-N folders the newest one that is new enough."""
    numbered = {int(match[1]): name for name in folders if (match := re.search(r"llvm-(\d+)$", name))}
    usable = [number for number in numbered if number >= OLDEST_CLANG]
    return numbered[max(usable)] if usable else None


def clang_package(search: str) -> int | None:
    """The newest clang-N that `apt-cache search` lists, if it is new enough."""
    numbers = [int(number) for number in re.findall(r"^clang-(\d+) ", search, re.MULTILINE)]
    return max((number for number in numbers if number >= OLDEST_CLANG), default=None)


def llvm_folder() -> Path | None:
    folders = [str(path.parents[1]) for path in Path("/usr/lib").glob("llvm-*/bin/clang-cl")]
    found = newest_clang([folder for folder in folders if Path(folder, "bin", "lld-link").exists()])
    return Path(found) if found else None


def missing_programs() -> list[str]:
    names = ["wine", f"{MINGW}-g++-posix", f"{MINGW}-objdump"]
    missing = [name for name in names if shutil.which(name) is None]
    return missing if llvm_folder() else [*missing, f"clang-cl {OLDEST_CLANG} and lld-link"]


def install_packages(log: Path) -> None:
    """Debian packages, as root or through sudo that asks for no password. Raises NotPossible."""
    missing = missing_programs()
    if not missing:
        return
    why = f"missing: {', '.join(missing)}; "
    if shutil.which("apt-get") is None:
        raise NotPossible(why + "there is no apt-get here to install them with")
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and (shutil.which("sudo") is None or subprocess.call([*sudo, "true"], stderr=subprocess.DEVNULL) != 0):
        raise NotPossible(why + "installing them takes root, or sudo without a password")
    with log.open("w", encoding="utf-8") as output:

        def apt(*words: str) -> bool:
            command = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", *words]
            return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) == 0

        if not apt("update"):
            raise NotPossible(why + f"apt-get update failed, see {log}")
        search = subprocess.run(
            ["apt-cache", "search", "--names-only", "^clang-[0-9]+$"], capture_output=True, text=True
        )
        clang = clang_package(search.stdout)
        if clang is None:
            raise NotPossible(why + f"no package clang-N with N >= {OLDEST_CLANG} in this distribution")
        packages = ["wine", "wine64", f"clang-{clang}", f"lld-{clang}", MINGW_PACKAGE]
        if not apt("install", "--no-install-recommends", *packages) or missing_programs():
            raise NotPossible(why + f"apt-get install {' '.join(packages)} failed, see {log}")


def fetch_wheels(cache: Path, cuda: str) -> None:
    """NVIDIA's win_amd64 wheels of this CUDA version, unpacked into cache/cuda."""
    target, done = cache / "cuda", cache / "cuda" / f".complete-{cuda}"
    if done.is_file():
        return
    shutil.rmtree(target, ignore_errors=True)
    wheels = cache / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "-d", str(wheels)]
    command += ["--no-deps", "--only-binary=:all:", "--platform", "win_amd64", "--python-version", "3.11"]
    # CCCL has version numbers of its own since CUDA 13.3; only <nv/target> of it is used, which any version serves.
    wanted = [f"{name}>=13" if name == "nvidia-cuda-cccl" else f"{name}=={cuda}.*" for name in WHEELS]
    if subprocess.call([*command, *wanted], stdin=subprocess.DEVNULL) != 0:
        raise GateError(f"pip could not download NVIDIA's Windows wheels for CUDA {cuda}; its messages stand above")
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if "cccl" in wheel.name:
                names = [name for name in names if "/include/" in name and "/nv/" in name]
            archive.extractall(target, names)
    shutil.rmtree(wheels)
    done.touch()


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def build_programs(cache: Path, llvm: Path) -> None:
    """The start scripts of both compilers, the cl.exe stand-in, the DLL start-up object."""
    python = f'exec "{sys.executable}" -E -s "{HERE / "compilers.py"}"'
    for name in ("nvcc", "cl"):
        write_script(cache / "bin" / name, f'#!/bin/sh\n{python} {name} "{cache}" "$@"\n')
    for name, program in {"clang-cl": "clang-cl", "lld-link": "lld-link", "llvm-lib": 'lld-link" "/lib'}.items():
        write_script(cache / "bin" / name, f'#!/bin/sh\nexec "{llvm / "bin"}/{program}" "$@"\n')
    msvc = msvc_folder(cache)
    msvc.mkdir(parents=True, exist_ok=True)
    for name in ("vcvarsall", "vcvars64"):  # nvcc.exe looks for them, even where it is told not to run them
        batch = cache / "msvc" / "VC" / "Auxiliary" / "Build" / f"{name}.bat"
        batch.parent.mkdir(parents=True, exist_ok=True)
        batch.write_bytes(b"@echo off\r\n")
    mingw = f"{MINGW}-gcc-posix"
    compile_if_older(msvc / "cl.exe", "cl.c", [mingw, "-O1", "-s", "-municode", "-o"])
    crt = [str(cache / "bin" / "clang-cl"), *TARGET, "-nologo", "-std:c++17", "-O2", "-GS-", "-X", "-c", "-o"]
    compile_if_older(cache / "lib" / "crt.obj", "crt.cpp", crt)
    # The import libraries of mingw-w64 list what Windows' own DLLs export, save functions that mingw-w64 has itself.
    for name in ("ucrtbase", "kernel32"):
        printed = subprocess.run([mingw, f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=True)
        shutil.copyfile(printed.stdout.strip(), cache / "lib" / f"{name}.lib")
    library = [
        str(cache / "bin" / "llvm-lib"),
        "/nologo",
        "/machine:x64",
        f"/def:{HERE / 'native' / 'ucrtbase_math.def'}",
    ]
    run([*library, f"/out:{cache / 'lib' / 'ucrtbase_math.lib'}"])


def compile_if_older(target: Path, source: str, command: list[str]) -> None:
    file = HERE / "native" / source
    if not target.is_file() or target.stat().st_mtime < file.stat().st_mtime:
        target.parent.mkdir(parents=True, exist_ok=True)
        run([*command, str(target), "--", str(file)] if "-c" in command else [*command, str(target), str(file)])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise GateError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def make_prefix(cache: Path) -> None:
    done = cache / "prefix" / ".complete"
    if done.is_file():
        return
    environ = {**os.environ, **wine_environment(cache)}
    with (cache / "wineboot.log").open("w", encoding="utf-8") as log:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": environ}
        if subprocess.call(["wine", "wineboot", "-i"], **pipes) != 0:
            raise GateError(f"wine could not make its prefix, see {log.name}")
        subprocess.call(["wineserver", "-w"], **pipes)
    done.touch()


def set_up(cache: Path, cuda: str = DEFAULT_CUDA) -> str:
    """Makes the cache whole and says what is in it. Safe to run again: what is there is kept."""
    cache.mkdir(parents=True, exist_ok=True)
    install_packages(cache / "apt.log")
    llvm = llvm_folder()
    assert llvm is not None, "install_packages checks it"
    fetch_wheels(cache, cuda)
    build_programs(cache, llvm)
    make_prefix(cache)
    said = [first_line([str(cache / "bin" / "clang-cl"), "--version"]), first_line(["wine", "--version"])]
    said.append(first_line([f"{MINGW}-g++-posix", "--version"]))
    return ", ".join([f"CUDA {cuda} for Windows", *said])


def first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout or done.stderr).strip().split("\n")[0]
