"""Findings of Windows alone: Visual Studio, its versions and nvcc's, flags in the way, paths, files in use."""

from __future__ import annotations

import re

from . import msvc
from .advice import with_variables
from .config import Config
from .facts import Facts
from .preflight import FATAL, NOTE, WARNING, Finding

BUILD_TOOLS = (
    'Visual Studio 2022 Build Tools with the workload "Desktop development with C++" (visualstudio.microsoft.com)'
)
# Windows' limit for a path, whose last character is the terminating zero. cl and nvcc know no longer ones.
LONGEST_PATH = 259
SHORTER_PATH = (
    "move the source to a short path such as C:\\src\\mamba, or name a short build folder: "
    "`python setup.py build -b C:\\b bdist_wheel`"
)
# The longest path in a build folder: CMake's own trial compilations, then our objects (a test compares).
LONGEST_OBJECT = 100


def check(config: Config, facts: Facts, label: str) -> list[Finding]:
    """Nothing is said on another platform."""
    if facts.platform != "win32":
        return []
    return [*check_studio(config, facts), *check_flags(config), *check_paths(facts, label), *check_in_use(facts)]


def check_studio(config: Config, facts: Facts) -> list[Finding]:
    """Whether there is a cl that compiles for x64 and that nvcc accepts."""
    found = facts.msvc or msvc.Discovery()
    # A compiler of the user's own choice; but nvcc takes cl only.
    if config.cxx and facts.compiler and facts.discovery.nvcc is None:
        return []
    findings = []
    if found.left_prompt and found.source:
        findings.append(
            Finding(
                "prompt-passed-over",
                NOTE,
                f"this Developer prompt is for {found.left_prompt}; the compiler for x64 is taken instead",
                'nothing; the prompt that fits is named "x64 Native Tools"',
            )
        )
    if found.problem:
        return [*findings, _problem(found, facts)]
    if facts.compiler is None:
        if config.cxx:
            return findings  # said by preflight.check_tools
        fact = f"no cl.exe is on PATH, and {found.source or 'nothing'} says that the environment holds the compiler"
        cure = "unset DISTUTILS_USE_SDK and use a plain PowerShell, where the build looks for Visual Studio itself"
        return [*findings, Finding("compiler-missing", FATAL, fact, cure)]
    if facts.compiler.target not in ("", "x64"):
        fact = f"{facts.compiler.path} compiles for {facts.compiler.target}"
        cure = "use a plain PowerShell, or the x64 Native Tools prompt"
        return [*findings, Finding("compiler-not-x64", FATAL, fact, cure)]
    return [*findings, *_versions(config, found, facts)]


def _problem(found: msvc.Discovery, facts: Facts) -> Finding:
    if found.problem == "msvc-missing":
        return Finding(
            "msvc-missing",
            FATAL,
            "cl, the C++ compiler, is not on PATH, and vswhere lists no Visual Studio",
            f"install {BUILD_TOOLS}: `winget install Microsoft.VisualStudio.2022.BuildTools --override "
            '"--wait --passive --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"`',
        )
    if found.problem == "msvc-without-cpp":
        studio = found.studios[0]
        return Finding(
            "msvc-without-cpp",
            FATAL,
            f"{_and(studio.name for studio in found.studios)}: installed without the C++ compiler for x64",
            'open "Visual Studio Installer", Modify, and add "Desktop development with C++"; or '
            '`& "${env:ProgramFiles(x86)}\\Microsoft Visual Studio\\Installer\\setup.exe" modify --installPath '
            f'"{studio.folder}" --add Microsoft.VisualStudio.Component.VC.Tools.x86.x64 --passive`',
        )
    there = ", ".join(toolset.version for toolset in found.toolsets)
    if found.problem == "toolset-missing":
        return Finding(
            "toolset-missing",
            FATAL,
            f"VCToolsVersion asks for toolset {found.detail}, and these are installed: {there}",
            "set it to one of those, add that toolset in Visual Studio Installer, or `Remove-Item Env:VCToolsVersion`",
        )
    if found.problem == "host-compiler-foreign":
        return Finding(
            "host-compiler-foreign",
            FATAL,
            f"CUDAHOSTCXX is {found.detail!r}, which is in none of the toolsets found: {there}",
            "start the Developer prompt that it belongs to and build there, or `Remove-Item Env:CUDAHOSTCXX`",
        )
    return Finding(
        "vcvarsall-failed",
        FATAL,
        f"vcvarsall.bat of {found.toolset.studio.name if found.toolset else '?'} failed: {found.detail}",
        "repair it in Visual Studio Installer (if it says that the input line is too long: shorten PATH); or build in "
        "the x64 Native Tools prompt",
    )


def _versions(config: Config, found: msvc.Discovery, facts: Facts) -> list[Finding]:
    compiler, accepted = facts.compiler, facts.msc_ver_range
    if compiler is None or not compiler.target or len(compiler.numbers) < 2:
        return []  # clang-cl, whose versions are others
    msc_ver = compiler.numbers[0] * 100 + compiler.numbers[1]
    if msc_ver < msvc.OLDEST_MSC_VER:
        fact = f"cl {compiler.version} is older than that of Visual Studio 2019 16.5 (19.25)"
        return [Finding("compiler-too-old", FATAL, fact, f"install {BUILD_TOOLS}")]
    if facts.discovery.nvcc is None or msvc.accepts(accepted, msc_ver):
        return []
    assert accepted is not None
    allowed = with_variables("win32", NVCC_PREPEND_FLAGS="-allow-unsupported-compiler")
    first, last = accepted[0], accepted[1] - 1
    fact = (
        f"nvcc {facts.nvcc_full_version} refuses cl {compiler.version} ({_studio(msc_ver)}); it takes "
        f"{first // 100}.{first % 100} to {last // 100}.{last % 100} ({_studio(first)} to {_studio(last)})"
    )
    if config.any_host_compiler:
        return [
            Finding("compiler-refused", WARNING, f"{fact}; taken all the same, as told", "if it fails, install VS 2022")
        ]
    others = [toolset for toolset in found.toolsets if msvc.accepts(accepted, toolset.msc_ver)]
    if others:
        cure = (
            f"`Remove-Item Env:VCToolsVersion, Env:CUDAHOSTCXX`, so that {others[0].studio.name} (toolset "
            f"{others[0].version}) is taken"
        )
    elif msc_ver < accepted[0]:
        cure = f"install {BUILD_TOOLS}, which can be installed beside yours"
    elif accepted[1] < 1950:
        cure = (
            f'either add "C++ x64/x86 build tools" 14.{last % 100} or older among the individual components of Visual '
            "Studio Installer, which a plain PowerShell then takes; or install CUDA 12.4 or newer"
        )
    else:
        cure = (
            f"either install {BUILD_TOOLS}, which can be installed beside yours and which a plain PowerShell finds; "
            "or a newer CUDA toolkit (13.2 and newer take Visual Studio 2026)"
        )
    return [Finding("compiler-refused", FATAL, fact, f"{cure}; or, untested, let nvcc try: `{allowed}`")]


def _studio(msc_ver: int) -> str:
    years = {1910: "2017", 1920: "2019", 1930: "2022", 1950: "2026", 1960: "newer than 2026"}
    return f"Visual Studio {max((start, year) for start, year in years.items() if start <= max(msc_ver, 1910))[1]}"


def check_flags(config: Config) -> list[Finding]:
    """The user's own compiler flags that would give a DLL two C runtimes, or a preprocessor that CUDA refuses."""
    findings = []
    for name, value in config.compiler_flags:
        wrong = re.search(r"(?<![\w/-])[/-](M[TD]d|MD|Zc:preprocessor-)(?![\w-])", value)
        if wrong:
            findings.append(
                Finding(
                    "flag-conflict",
                    FATAL,
                    f"{name} holds {wrong.group(0)}; these libraries need /MT and /Zc:preprocessor",
                    f"take it out, or `Remove-Item Env:{name}`",
                )
            )
    return findings


def check_paths(facts: Facts, label: str) -> list[Finding]:
    findings = []
    folder = f"{facts.root}\\build\\native-{label.split('.')[0]}-01234567"
    if path_too_long(folder):
        findings.append(
            Finding(
                "path-long",
                WARNING,
                f"paths of up to {len(folder) + 1 + LONGEST_OBJECT} characters in {folder}; Windows stops at 260",
                SHORTER_PATH,
            )
        )
    odd = [path for path in (facts.root, facts.temp) if not path.isascii()]
    if odd and facts.discovery.nvcc is not None:
        findings.append(
            Finding(
                "path-not-ascii",
                WARNING,
                f"nvcc may not find files below {_and(odd)}: it reads paths in the system's code page",
                f"if it fails: source in C:\\src\\mamba, and `{with_variables('win32', TEMP='C:/tmp', TMP='C:/tmp')}` "
                "(that folder must exist)",
            )
        )
    return findings


def path_too_long(folder: str) -> bool:
    """Whether objects in this build folder would pass what Windows' compilers can open."""
    return len(folder) + 1 + LONGEST_OBJECT > LONGEST_PATH


def check_in_use(facts: Facts) -> list[Finding]:
    if not facts.libraries_in_use:
        return []
    return [
        Finding(
            "library-in-use",
            WARNING,
            f"a running Python has loaded {_and(facts.libraries_in_use)}; nothing can write there now (LNK1104)",
            "close it: `Get-Process | Where-Object { $_.Modules.ModuleName -like 'mamba_*.dll' }` lists who",
        )
    ]


def _and(words) -> str:
    return " and ".join(words)
