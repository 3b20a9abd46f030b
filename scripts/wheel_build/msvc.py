"""Which Microsoft C++ compiler a Windows build takes, and how its environment is asked for. Nothing runs here.

Names of environment variables are in upper case, as Windows' os.environ holds them.
"""

from __future__ import annotations

import json
import ntpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .cuda import FileSystem, find_program

# /Zc:preprocessor came with Visual Studio 2019 16.5.
OLDEST_MSC_VER = 1925
VCVARSALL = r"VC\Auxiliary\Build\vcvarsall.bat"
# What a Developer prompt sets; VSCMD_... and __VSCMD_... besides. PATH is what it was before.
SET_BY_PROMPT = re.compile(
    r"_*VSCMD_.*|__DOTNET_.*|FRAMEWORK.*|WINDOWSSDK.*|VCTOOLS.*|VC(IDE)?INSTALLDIR|VSINSTALLDIR|VISUALSTUDIOVERSION"
    r"|UCRTVERSION|UNIVERSALCRTSDKDIR|DEVENVDIR|INCLUDE|EXTERNAL_INCLUDE|LIB|LIBPATH|IFCPATH|WINDOWSLIBPATH|PLATFORM"
)
PATH_BEFORE_PROMPT = "__VSCMD_PREINIT_PATH"


@dataclass(frozen=True)
class Studio:
    """One Visual Studio, of any edition."""

    name: str  # Visual Studio Build Tools 2022
    folder: str
    version: str  # 17.14.36310.24


@dataclass(frozen=True)
class Toolset:
    """One version of the C++ compiler for x64 in a Visual Studio, which can hold several."""

    studio: Studio
    version: str  # 14.44.35207

    @property
    def folder(self) -> str:
        return ntpath.join(self.studio.folder, r"VC\Tools\MSVC", self.version)

    @property
    def cl(self) -> str:
        return ntpath.join(self.folder, r"bin\Hostx64\x64\cl.exe")

    @property
    def msc_ver(self) -> int:
        """_MSC_VER, by which CUDA's headers tell compilers apart: 1944 for toolset 14.44."""
        return 1900 + numbers(self.version)[1]


@dataclass(frozen=True)
class Discovery:
    """Where the compiler comes from, or what is in the way of it.

    source: prompt (a Developer prompt for x64), DISTUTILS_USE_SDK or PATH (the environment is taken as it is), vswhere
    (`toolset` is taken, with vcvarsall's environment), or "" with a problem.
    problem: "", msvc-missing, msvc-without-cpp, toolset-missing, host-compiler-foreign, vcvarsall-failed.
    """

    source: str = ""
    toolset: Toolset | None = None
    problem: str = ""
    detail: str = ""  # the value that the problem is about, or vcvarsall's words
    studios: tuple[Studio, ...] = ()
    toolsets: tuple[Toolset, ...] = ()  # all there are, newest first
    left_prompt: str = ""  # the architecture of the Developer prompt that was passed over


def vswhere_path(environ: Mapping[str, str], files: FileSystem) -> str | None:
    """The installer puts it in one fixed place; package managers put it on PATH."""
    for variable, usual in (("PROGRAMFILES(X86)", r"C:\Program Files (x86)"), ("PROGRAMFILES", r"C:\Program Files")):
        base = environ.get(variable, "").strip() or usual
        path = ntpath.join(base, r"Microsoft Visual Studio\Installer\vswhere.exe")
        if files.is_file(path):
            return path
    return find_program("vswhere", environ, "win32", files)


# Without -requires: a Visual Studio that lacks C++ must be told from none.
VSWHERE_ARGUMENTS = ("-products", "*", "-format", "json", "-utf8")


def parse_vswhere(text: str) -> list[Studio]:
    """What `vswhere -format json` lists; nothing if it is no such list."""
    try:
        entries = json.loads(text.lstrip("\ufeff"))
    except ValueError:
        return []
    studios = []
    for entry in entries if isinstance(entries, list) else []:
        folder = entry.get("installationPath") if isinstance(entry, dict) else None
        if folder:
            version = entry.get("installationVersion", "")
            studios.append(Studio(entry.get("displayName") or "Visual Studio", folder.rstrip("\\/"), version))
    return studios


def find_toolsets(studios: Iterable[Studio], files: FileSystem) -> list[Toolset]:
    """Every compiler for x64 there is, newest first."""
    found = []
    for studio in studios:
        for name in files.list_folder(ntpath.join(studio.folder, r"VC\Tools\MSVC")):
            toolset = Toolset(studio, name)
            if re.fullmatch(r"14\.\d+\.\d+", name) and files.is_file(toolset.cl):
                found.append(toolset)
    return sorted(found, key=lambda toolset: (numbers(toolset.version), numbers(toolset.studio.version)), reverse=True)


def needs_vswhere(environ: Mapping[str, str], files: FileSystem) -> bool:
    return _as_it_is(environ, files) == ""


def _as_it_is(environ: Mapping[str, str], files: FileSystem) -> str:
    """Why the environment is taken as it is; "" if a Visual Studio must be looked for."""
    if environ.get("DISTUTILS_USE_SDK", "").strip():
        return "DISTUTILS_USE_SDK"
    target, host = (environ.get(f"VSCMD_ARG_{kind}_ARCH", "").lower() for kind in ("TGT", "HOST"))
    if target:
        # The prompt named plainly "Developer PowerShell" is for 32 bits: its Visual Studio has the right compiler too.
        return "prompt" if target == "x64" and host in ("", "x64") else ""
    if environ.get("INCLUDE") and environ.get("LIB") and find_program("cl", environ, "win32", files):
        return "PATH"
    return ""


def discover(
    environ: Mapping[str, str],
    files: FileSystem,
    vswhere: str = "",
    cuda: bool = True,
    accepted: tuple[int, int] | None = None,
) -> Discovery:
    """The environment as it is in a prompt for x64; else the newest toolset that the nvcc found accepts.

    `vswhere`: what it printed. `accepted`: the _MSC_VER values that nvcc takes, from the first to before the second;
    None: all. VCToolsVersion (14.44 or 14.44.35207) and, with CUDA, CUDAHOSTCXX (a cl.exe, or its folder) name a
    toolset. If nvcc accepts none, the newest is taken, and the preflight says so.
    """
    source = _as_it_is(environ, files)
    if source:
        return Discovery(source)
    prompt = environ.get("VSCMD_ARG_TGT_ARCH", "").lower()
    studios = parse_vswhere(vswhere)
    toolsets = find_toolsets(studios, files)
    seen = {"studios": tuple(studios), "toolsets": tuple(toolsets), "left_prompt": prompt}
    if not toolsets:
        return Discovery(problem="msvc-without-cpp" if studios else "msvc-missing", **seen)

    chosen = toolsets
    # In a prompt it is the prompt's doing, not the user's word.
    version = "" if prompt else environ.get("VCTOOLSVERSION", "").strip()
    if version:
        chosen = [toolset for toolset in chosen if f"{toolset.version}.".startswith(f"{version}.")]
        if not chosen:
            return Discovery(problem="toolset-missing", detail=version, **seen)
    host = environ.get("CUDAHOSTCXX", "").strip().strip('"') if cuda else ""
    if host and ntpath.dirname(host):
        chosen = [toolset for toolset in chosen if _inside(host, toolset.folder)]
        if not chosen:
            return Discovery(problem="host-compiler-foreign", detail=host, **seen)

    fitting = [toolset for toolset in chosen if accepts(accepted, toolset.msc_ver)]
    return Discovery("vswhere", (fitting or chosen)[0], **seen)


def accepts(accepted: tuple[int, int] | None, msc_ver: int) -> bool:
    """Whether this compiler is new enough for us and within what nvcc's header takes."""
    return msc_ver >= OLDEST_MSC_VER and (accepted is None or accepted[0] <= msc_ver < accepted[1])


def _inside(path: str, folder: str) -> bool:
    path, folder = (ntpath.normcase(ntpath.normpath(name)) for name in (path, folder))
    return path.startswith(folder + "\\")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# ---- vcvarsall -------------------------------------------------------------------------------------------------------

MARK = "environment-after-vcvarsall="
# Python reads the environment as Windows holds it, and prints ASCII: no code page can spoil a name. No character here
# means anything to cmd.
PRINT_ENVIRONMENT = f"import json,os;print('{MARK}'+json.dumps(dict(os.environ)))"


def vcvarsall_command(toolset: Toolset, python: str) -> str:
    """The command line for cmd, which /s makes strip the outermost quotes only."""
    batch = ntpath.join(toolset.studio.folder, VCVARSALL)
    inner = f'call "{batch}" x64 -vcvars_ver={toolset.version} && "{python}" -I -c "{PRINT_ENVIRONMENT}"'
    return f'cmd.exe /d /s /c "{inner}"'


def environment_for_vcvarsall(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment to start from: as it was before a Developer prompt."""
    result = dict(environ)
    if environ.get("VSCMD_ARG_TGT_ARCH"):
        result = {name: value for name, value in environ.items() if not SET_BY_PROMPT.fullmatch(name)}
        result["PATH"] = environ.get(PATH_BEFORE_PROMPT) or environ.get("PATH", "")
    # Its telemetry starts PowerShell, which takes seconds.
    return {**result, "VSCMD_SKIP_SENDTELEMETRY": "1"}


def parse_environment(output: str, files: FileSystem) -> tuple[dict[str, str], str]:
    """(the environment, "") from the command's output, or ({}, why not)."""
    said, marked, text = output.partition(MARK)
    said = " ".join(said.split())[-500:]
    try:
        found = {name.upper(): value for name, value in json.loads(text).items()} if marked else {}
    except ValueError:
        found = {}
    if not found:
        return {}, said or "it did not run to its end, and said nothing"
    missing = [name for name in ("INCLUDE", "LIB") if not found.get(name)]
    if not find_program("cl", found, "win32", files):
        missing.append("cl.exe on PATH")
    if missing:
        return {}, f"it set no {', '.join(missing)}; it said: {said or 'nothing'}"
    return found, ""
