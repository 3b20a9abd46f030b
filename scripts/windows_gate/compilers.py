"""The two programs between CMake, nvcc.exe and clang-cl. toolchain.py writes a start script for each.

`nvcc ARGUMENTS...` runs NVIDIA's Windows nvcc.exe under Wine with Linux paths, as CMake on Linux calls it.
`cl FOLDER OUT ERR ARGUMENTS...` is what nvcc.exe gets for cl.exe (native/cl.c passes it on): clang-cl, made to look
like Visual C++ 2022 to the sources it preprocesses. Wine passes Linux programs no handles, so OUT and ERR are files.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

# Visual C++ 2022 17.14: the version that is passed to nvcc.exe, and the folder layout by which it recognises it.
MSVC_VERSION = "14.44.35207"
TARGET = ["--target=x86_64-pc-windows-msvc", f"-fms-compatibility-version=19.{MSVC_VERSION.split('.', 1)[1]}"]
# clang's own names, which cl.exe does not have and headers ask for.
HIDDEN = [
    *(f"__{name}__" for name in ("clang", "clang_major", "clang_minor", "clang_patchlevel", "clang_version", "llvm")),
    *(f"__has_{name}" for name in ("attribute", "builtin", "feature", "extension", "declspec_attribute")),
    *("__has_constexpr_builtin", "__is_identifier", "__building_module"),
]
# Options of nvcc whose next word is not a path, whatever it looks like.
PASSED_ON = re.compile(r"-X\w+|--(compiler|ptxas|linker|archive|cudafe)-options|-M[TQ]")
# Options of cl with a path, glued on or as the next word; and those that mean nothing to clang-cl.
WITH_PATH = ("I", "Fo", "Fe", "FI", "Fi", "external:I")
IGNORED = re.compile(r"-(Zc:preprocessor|wd\d+|external:|FS|Fd|MP|W[0-4X]|bigobj|errorReport|Brepro|utf-8)")


def windows_path(path: str) -> str:
    """/a/b as a program under Wine names it: Z:\\a\\b. A relative path keeps its place."""
    return f"Z:{path}".replace("/", "\\") if path.startswith("/") else path.replace("/", "\\")


def linux_path(path: str, prefix: str) -> str:
    """The file that a Windows path names; drives other than Z: lie in the Wine prefix."""
    match = re.match(r"([A-Za-z]):[\\/]+(.*)", path, re.DOTALL)
    if match is None:
        return path.replace("\\", "/")
    top = "/" if match[1] in "zZ" else f"{prefix}/drive_{match[1].lower()}/"
    return top + re.sub(r"[\\/]+", "/", match[2])


# ---- nvcc ------------------------------------------------------------------------------------------------------------


def nvcc_arguments(arguments: Sequence[str]) -> list[str]:
    """nvcc's arguments with every path as Windows names it; response files are unfolded."""
    result: list[str] = []
    words = iter(arguments)
    for word in words:
        if PASSED_ON.fullmatch(word):
            result += [word, next(words)]
        elif word == "--options-file":
            result += nvcc_arguments(shlex.split(Path(next(words)).read_text(encoding="utf-8")))
        elif word.startswith("/"):
            result.append(windows_path(word))
        elif re.match(r"-[ILo]/", word):
            result.append(word[:2] + windows_path(word[2:]))
        elif re.match(r"-(?!X)[\w-]+=/", word):
            option, _, path = word.partition("=")
            result.append(f"{option}={windows_path(path)}")
        else:
            result.append(word)
    return result


def readable(text: str) -> str:
    """nvcc.exe's messages with Linux paths, without the lines in which cl and cudafe++ name the file they are at."""
    text = text.replace("\r", "")
    text = re.sub(r"^(tmpxft_\S*|[^:(\n]*\.(cu|cpp|c))\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\b[Zz]:[\\/][^\s\"():]*", lambda match: re.sub(r"[\\/]+", "/", match[0][2:]), text)


def run_nvcc(cache: Path, arguments: Sequence[str]) -> int:
    visual_studio = cache / "msvc"
    environ = {
        **os.environ,
        **wine_environment(cache),
        "GATE_CL": str(cache / "bin" / "cl"),
        "WINEPATH": windows_path(str(msvc_folder(cache))),
        "VSCMD_VER": "17.14",
        "VSINSTALLDIR": windows_path(str(visual_studio)),
    }
    command = ["wine", str(cuda_folder(cache) / "bin" / "nvcc.exe"), "-use-local-env", *nvcc_arguments(arguments)]
    # Files, not pipes: the first call under Wine starts Wine's services, which keep its output open for as long as
    # they run. Reading a pipe to its end would wait for them, in one of ninja's places.
    with TemporaryFile() as output, TemporaryFile() as errors:
        code = subprocess.call(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        for file, stream in ((output, sys.stdout), (errors, sys.stderr)):
            file.seek(0)
            print(readable(file.read().decode("utf-8", "replace")), end="", file=stream)
    if "-MF" in arguments:  # Ninja reads it
        listing = Path(arguments[list(arguments).index("-MF") + 1])
        if listing.is_file():
            text = listing.read_text(encoding="utf-8").replace("\r", "")
            listing.write_text(re.sub(r"\b[Zz]:/", "/", text), encoding="utf-8")
    return code


def wine_environment(cache: Path) -> dict[str, str]:
    """What every Windows program of the gate runs in: a Wine prefix of its own, no debug output, no desktop."""
    return {
        "WINEPREFIX": str(cache / "prefix"),
        "WINEARCH": "win64",
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree,mshtml,winemenubuilder.exe=",
    }


def cuda_folder(cache: Path) -> Path:
    return cache / "cuda" / "nvidia" / "cu13"


def msvc_folder(cache: Path) -> Path:
    return cache / "msvc" / "VC" / "Tools" / "MSVC" / MSVC_VERSION / "bin" / "Hostx64" / "x64"


# ---- cl --------------------------------------------------------------------------------------------------------------


def cl_words(arguments: Sequence[str], folder: str, prefix: str) -> Iterator[str]:
    """cl's arguments, its response files (UTF-8 or UTF-16) unfolded."""
    for word in arguments:
        if not word.startswith("@"):
            yield word
            continue
        raw = Path(folder, linux_path(word[1:], prefix)).read_bytes()
        text = raw.decode("utf-16") if raw[:2] == b"\xff\xfe" else raw.decode("utf-8-sig")
        yield from (part.replace('"', "") for part in re.findall(r'(?:[^\s"]|"[^"]*")+', text))


def clang_cl_arguments(arguments: Sequence[str], folder: str, prefix: str, include: str) -> list[str]:
    """clang-cl's arguments for cl's."""
    options: list[str] = []
    files: list[str] = []
    traditional, standard = True, ["-std:c++14"]  # cl's defaults
    words = cl_words(arguments, folder, prefix)
    for word in words:
        if word[:1] not in ("-", "/"):
            files.append(linux_path(word, prefix))
            continue
        name = word[1:]
        if name.startswith("std:"):
            standard = []
        if name == "Zc:preprocessor":
            traditional = False
        option = next((option for option in WITH_PATH if name.startswith(option)), None)
        if option is not None:
            name = option + linux_path((name[len(option) :] or next(words)).strip('"'), prefix)
        elif name in ("D", "U"):
            name += next(words)
        if not IGNORED.match(f"-{name}"):
            options.append(f"-{name}")
    fixed = [*TARGET, "-X", "/clang:-nobuiltininc", f"-imsvc{include}", *standard, "-w", "-Wno-unknown-argument"]
    fixed += [f"-U{name}" for name in HIDDEN] + [f"-D_MSVC_TRADITIONAL={int(traditional)}"]
    if "-c" in options:
        # Kernels are registered by unreferenced static variables (.CRT$XCT), which clang drops and cl keeps: without
        # this the DLL links and loads, and has no GPU code.
        fixed.append("/clang:-fkeep-persistent-storage-variables")
    # "--": a path that begins with /w is an option to clang-cl.
    return [*fixed, *options, "--", *files]


def run_cl(cache: Path, folder: str, out: str, err: str, *arguments: str) -> int:
    prefix = str(cache / "prefix")
    folder, out, err = (linux_path(path, prefix) for path in (folder, out, err))
    include = str(Path(__file__).resolve().parent / "include")
    words = clang_cl_arguments(arguments, folder, prefix, include)
    with open(out, "wb") as output, open(err, "wb") as errors:
        command = [str(cache / "bin" / "clang-cl"), *words]
        code = subprocess.call(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
    if "-E" in words:  # cl's form of line markers
        text = re.sub(rb'(?m)^# (\d+) ("[^"]*").*$', rb"#line \1 \2", Path(out).read_bytes())
        Path(out).write_bytes(text.replace(b"\n", b"\r\n"))
    return code


if __name__ == "__main__":
    program, where, *rest = sys.argv[1:]
    sys.exit({"nvcc": run_nvcc, "cl": lambda cache, words: run_cl(cache, *words)}[program](Path(where), rest))
