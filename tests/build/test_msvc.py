"""Which Visual Studio a Windows build takes: made-up machines, real answers of vswhere and vcvarsall written down."""

import json
import ntpath
import subprocess
import sys

import pytest
from wheel_build import cmake, cuda, facts, msvc, plan, tools
from wheel_build.config import read_config

PF, PF86 = r"C:\Program Files", r"C:\Program Files (x86)"
VSWHERE = PF86 + r"\Microsoft Visual Studio\Installer\vswhere.exe"
TOOLS_2019 = (PF86 + r"\Microsoft Visual Studio\2019\BuildTools", "Visual Studio Build Tools 2019", "16.11.36")
TOOLS_2022 = (PF86 + r"\Microsoft Visual Studio\2022\BuildTools", "Visual Studio Build Tools 2022", "17.14.36310.24")
HOME_2022 = (PF + r"\Microsoft Visual Studio\2022\Community", "Visual Studio Community 2022", "17.9.34714.143")
PRO_2022 = (r"D:\Entwicklung (neu)\Müller & Söhne\VS", "Visual Studio Professional 2022", "17.12.35527.113")
WORK_2022 = (r"E:\vs2022", "Visual Studio Enterprise 2022", "17.8.34330.188")
HOME_2026 = (PF + r"\Microsoft Visual Studio\18\Community", "Visual Studio Community 2026", "18.0.11205.157")
V2017, V2019, V2022, V2022_OLD, V2026 = "14.16.27023", "14.29.30133", "14.44.35207", "14.38.33130", "14.50.35717"
CUDA_12_0, CUDA_13_0, CUDA_13_2 = (1910, 1940), (1920, 1950), (1920, 1960)


def vswhere(*studios):
    return json.dumps(
        [{"installationPath": folder, "displayName": name, "installationVersion": v} for folder, name, v in studios]
    )


def cl(studio, version, host="Hostx64", target="x64"):
    return ntpath.join(studio[0], r"VC\Tools\MSVC", version, "bin", host, target, "cl.exe")


# what it is, {studio: its toolsets}, what nvcc accepts, environment -> (studio, toolset)
CHOSEN = [
    ("Build Tools 2019", {TOOLS_2019: [V2019]}, CUDA_13_0, {}, (TOOLS_2019, V2019)),
    ("Build Tools 2022", {TOOLS_2022: [V2022]}, CUDA_13_0, {}, (TOOLS_2022, V2022)),
    ("Community", {HOME_2022: [V2022]}, CUDA_13_0, {}, (HOME_2022, V2022)),
    ("Professional, spaces, parentheses, umlauts, D:", {PRO_2022: [V2022]}, CUDA_13_0, {}, (PRO_2022, V2022)),
    ("Enterprise on E:", {WORK_2022: [V2022_OLD]}, CUDA_13_0, {}, (WORK_2022, V2022_OLD)),
    ("no CUDA: the newest", {TOOLS_2022: [V2022], HOME_2026: [V2026]}, None, {}, (HOME_2026, V2026)),
    ("the newest that nvcc takes", {TOOLS_2022: [V2022], HOME_2026: [V2026]}, CUDA_13_0, {}, (TOOLS_2022, V2022)),
    ("... in any order", {HOME_2026: [V2026], TOOLS_2022: [V2022]}, CUDA_13_0, {}, (TOOLS_2022, V2022)),
    ("CUDA 13.2 takes 2026", {TOOLS_2022: [V2022], HOME_2026: [V2026]}, CUDA_13_2, {}, (HOME_2026, V2026)),
    ("CUDA 12.0 stops before 19.40", {TOOLS_2022: [V2022, V2022_OLD]}, CUDA_12_0, {}, (TOOLS_2022, V2022_OLD)),
    ("CUDA 12.0, 2019 beside", {TOOLS_2022: [V2022], TOOLS_2019: [V2019]}, CUDA_12_0, {}, (TOOLS_2019, V2019)),
    ("2026 with the toolset of 2022", {HOME_2026: [V2026, V2022]}, CUDA_13_0, {}, (HOME_2026, V2022)),
    ("same toolset twice: the newer studio", {HOME_2022: [V2022], TOOLS_2022: [V2022]}, None, {}, (TOOLS_2022, V2022)),
    ("2017 is passed over", {TOOLS_2019: [V2017, V2019]}, CUDA_12_0, {}, (TOOLS_2019, V2019)),
    ("none is taken by nvcc: the newest, and preflight tells", {HOME_2026: [V2026]}, CUDA_13_0, {}, (HOME_2026, V2026)),
    (
        "VCToolsVersion, whole",
        {TOOLS_2022: [V2022, V2022_OLD]},
        None,
        {"VCTOOLSVERSION": V2022_OLD},
        (TOOLS_2022, V2022_OLD),
    ),
    (
        "VCToolsVersion, short",
        {TOOLS_2022: [V2022, V2022_OLD]},
        None,
        {"VCTOOLSVERSION": "14.38"},
        (TOOLS_2022, V2022_OLD),
    ),
    (
        "CUDAHOSTCXX, cl.exe",
        {TOOLS_2022: [V2022, V2022_OLD]},
        CUDA_13_0,
        {"CUDAHOSTCXX": cl(TOOLS_2022, V2022_OLD)},
        (TOOLS_2022, V2022_OLD),
    ),
    (
        "CUDAHOSTCXX, its folder, slashes, quotes",
        {HOME_2022: [V2022], TOOLS_2022: [V2022]},
        CUDA_13_0,
        {"CUDAHOSTCXX": f'"{ntpath.dirname(cl(HOME_2022, V2022)).upper()}"'.replace("\\", "/")},
        (HOME_2022, V2022),
    ),
    (
        "CUDAHOSTCXX without a folder says nothing",
        {TOOLS_2022: [V2022]},
        CUDA_13_0,
        {"CUDAHOSTCXX": "cl"},
        (TOOLS_2022, V2022),
    ),
    (
        "empty variables are not set",
        {TOOLS_2022: [V2022]},
        CUDA_13_0,
        {"VCTOOLSVERSION": " ", "CUDAHOSTCXX": ""},
        (TOOLS_2022, V2022),
    ),
    (
        "cl on PATH, but no INCLUDE and LIB",
        {TOOLS_2022: [V2022]},
        None,
        {"PATH": ntpath.dirname(cl(TOOLS_2022, V2022))},
        (TOOLS_2022, V2022),
    ),
    (
        "a 32-bit prompt, of another version",
        {TOOLS_2022: [V2022, V2022_OLD]},
        CUDA_13_0,
        {"VSCMD_ARG_TGT_ARCH": "x86", "VSCMD_ARG_HOST_ARCH": "x86", "VCTOOLSVERSION": V2022_OLD},
        (TOOLS_2022, V2022),
    ),
    (
        "a prompt for ARM",
        {TOOLS_2022: [V2022]},
        CUDA_13_0,
        {"VSCMD_ARG_TGT_ARCH": "arm64", "VSCMD_ARG_HOST_ARCH": "x64"},
        (TOOLS_2022, V2022),
    ),
    (
        "x64 tools that run in 32 bits",
        {TOOLS_2022: [V2022]},
        CUDA_13_0,
        {"VSCMD_ARG_TGT_ARCH": "x64", "VSCMD_ARG_HOST_ARCH": "x86"},
        (TOOLS_2022, V2022),
    ),
]


@pytest.mark.parametrize(
    ("studios", "accepted", "environ", "expected"), [row[1:] for row in CHOSEN], ids=[row[0] for row in CHOSEN]
)
def test_chosen(made_up, studios, accepted, environ, expected):
    present = [cl(studio, version) for studio, versions in studios.items() for version in versions]
    found = msvc.discover(environ, made_up("win32", present), vswhere(*studios), True, accepted)
    assert (found.source, found.problem) == ("vswhere", "")
    (folder, name, version), toolset = expected
    assert found.toolset == msvc.Toolset(msvc.Studio(name, folder, version), toolset)
    assert found.left_prompt == environ.get("VSCMD_ARG_TGT_ARCH", "")


# what it is, vswhere's answer, files, environment -> problem, detail
PROBLEMS = [
    ("no Visual Studio", vswhere(), [], {}, "msvc-missing", ""),
    ("no vswhere", "", [], {}, "msvc-missing", ""),
    ("vswhere says something else", "Error 0x57: unknown parameter", [], {}, "msvc-missing", ""),
    ("vswhere's list has another form", '{"a": 1}', [], {}, "msvc-missing", ""),
    ("without C++", vswhere(HOME_2022), [], {}, "msvc-without-cpp", ""),
    ("for 32 bits only", vswhere(HOME_2022), [cl(HOME_2022, V2022, target="x86")], {}, "msvc-without-cpp", ""),
    ("for ARM only", vswhere(HOME_2022), [cl(HOME_2022, V2022, "Hostarm64", "arm64")], {}, "msvc-without-cpp", ""),
    (
        "no such VCToolsVersion",
        vswhere(HOME_2022),
        [cl(HOME_2022, V2022)],
        {"VCTOOLSVERSION": "14.4"},
        "toolset-missing",
        "14.4",
    ),
    (
        "CUDAHOSTCXX elsewhere",
        vswhere(HOME_2022),
        [cl(HOME_2022, V2022)],
        {"CUDAHOSTCXX": r"F:\cl.exe"},
        "host-compiler-foreign",
        r"F:\cl.exe",
    ),
    (
        "CUDAHOSTCXX of another Visual Studio",
        vswhere(HOME_2022),
        [cl(HOME_2022, V2022)],
        {"CUDAHOSTCXX": cl(TOOLS_2022, V2022)},
        "host-compiler-foreign",
        cl(TOOLS_2022, V2022),
    ),
    (
        "a 32-bit prompt, and nothing for x64",
        vswhere(HOME_2022),
        [],
        {"VSCMD_ARG_TGT_ARCH": "x86"},
        "msvc-without-cpp",
        "",
    ),
]


@pytest.mark.parametrize(
    ("said", "present", "environ", "problem", "detail"), [row[1:] for row in PROBLEMS], ids=[row[0] for row in PROBLEMS]
)
def test_problem(made_up, said, present, environ, problem, detail):
    found = msvc.discover(environ, made_up("win32", present), said, True, CUDA_13_0)
    assert (found.source, found.toolset, found.problem, found.detail) == ("", None, problem, detail)


def test_cudahostcxx_is_nothing_to_a_build_without_cuda(made_up):
    files = made_up("win32", [cl(HOME_2022, V2022)])
    assert msvc.discover({"CUDAHOSTCXX": r"F:\cl.exe"}, files, vswhere(HOME_2022), cuda=False).toolset is not None


PATH_CL = {"PATH": r"C:\x;C:\msvc\bin", "INCLUDE": r"C:\msvc\include", "LIB": r"C:\msvc\lib"}
AS_IT_IS = [
    ({"VSCMD_ARG_TGT_ARCH": "x64", "VSCMD_ARG_HOST_ARCH": "x64", "VCTOOLSVERSION": V2026}, "prompt"),
    ({"VSCMD_ARG_TGT_ARCH": "x64"}, "prompt"),
    ({"DISTUTILS_USE_SDK": "1"}, "DISTUTILS_USE_SDK"),
    ({"DISTUTILS_USE_SDK": "1", "VSCMD_ARG_TGT_ARCH": "x86"}, "DISTUTILS_USE_SDK"),
    (PATH_CL, "PATH"),
    ({"DISTUTILS_USE_SDK": " "}, ""),
    ({"VSCMD_ARG_TGT_ARCH": "x86"}, ""),
    ({**PATH_CL, "LIB": ""}, ""),
    ({**PATH_CL, "PATH": r"C:\x"}, ""),
    ({**PATH_CL, "VSCMD_ARG_TGT_ARCH": "x86"}, ""),
    ({}, ""),
]


@pytest.mark.parametrize(("environ", "source"), AS_IT_IS)
def test_environment_taken_as_it_is(made_up, environ, source):
    files = made_up("win32", [r"C:\msvc\bin\cl.exe", cl(TOOLS_2022, V2022)])
    assert msvc.needs_vswhere(environ, files) == (source == "")
    found = msvc.discover(environ, files, vswhere(TOOLS_2022), True, CUDA_13_0)
    assert found.source == (source or "vswhere")
    assert (found.toolset is None) == bool(source)


@pytest.mark.parametrize(
    ("environ", "present", "path"),
    [
        ({}, [VSWHERE], VSWHERE),
        ({"PROGRAMFILES(X86)": r"D:\Programme (x86)"}, [VSWHERE.replace(PF86, r"D:\Programme (x86)")], r"D:\Programme"),
        ({"PROGRAMFILES(X86)": ""}, [VSWHERE], VSWHERE),
        ({}, [VSWHERE.replace(PF86, PF)], PF),
        ({"PATH": r"C:\choco\bin"}, [r"C:\choco\bin\vswhere.exe"], r"C:\choco\bin\vswhere.exe"),
        ({"PATH": r"C:\choco\bin"}, [], None),
    ],
)
def test_vswhere_is_found(made_up, environ, present, path):
    found = msvc.vswhere_path(environ, made_up("win32", present))
    assert found is None if path is None else found.startswith(path)


def test_vswhere_answer_with_a_byte_order_mark_and_without_names():
    said = "\ufeff" + json.dumps([{"installationPath": "C:\\VS\\"}, {"instanceId": "1"}, "?"])
    assert msvc.parse_vswhere(said) == [msvc.Studio("Visual Studio", r"C:\VS", "")]


def test_msc_ver():
    studio = msvc.Studio("", "", "")
    assert [msvc.Toolset(studio, v).msc_ver for v in (V2017, V2019, V2022, V2026)] == [1916, 1929, 1944, 1950]


# ---- vcvarsall -------------------------------------------------------------------------------------------------------


def test_vcvarsall_command_survives_any_path():
    toolset = msvc.Toolset(msvc.Studio("", PRO_2022[0], ""), V2022)
    assert msvc.vcvarsall_command(toolset, r"C:\Users\Łukasz (x)\python.exe") == (
        r'cmd.exe /d /s /c "call "D:\Entwicklung (neu)\Müller & Söhne\VS\VC\Auxiliary\Build\vcvarsall.bat" x64 '
        r'-vcvars_ver=14.44.35207 && "C:\Users\Łukasz (x)\python.exe" -I -c "' + msvc.PRINT_ENVIRONMENT + '""'
    )
    # ... because cmd reads nothing into what is printed, and printing needs no quotes of its own
    assert not set(msvc.PRINT_ENVIRONMENT) & set('"%!^&|<>')


def test_environment_comes_back_whole(made_up):
    """The program that vcvarsall's shell runs, run here: names and values of every kind, whatever the encoding."""
    there = {"Path": r"C:\msvc\bin", "INCLUDE": "C:\\Müller\\Łódź\\日本", "Lib": "a\nb", "X": "=;%A%"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", msvc.PRINT_ENVIRONMENT], env=there, capture_output=True, check=True
    )
    output = "** Visual Studio 2022 **\n[vcvarsall.bat] for 'x64'\n" + done.stdout.decode("ascii")
    found, trouble = msvc.parse_environment(output, made_up("win32", [r"C:\msvc\bin\cl.exe"]))
    assert trouble == ""
    assert found.items() >= {"PATH": there["Path"], "INCLUDE": there["INCLUDE"], "LIB": "a\nb", "X": "=;%A%"}.items()


@pytest.mark.parametrize(
    ("output", "trouble"),
    [
        ("", "said nothing"),
        ("[ERROR:vcvars.bat] Toolset directory for version '14.38' was not found.\n", "Toolset directory for version"),
        ("The input line is too long.\r\n", "The input line is too long."),
        (f"{msvc.MARK}{{broken", "said nothing"),
        (f"{msvc.MARK}" + json.dumps({"INCLUDE": "i", "LIB": "l", "PATH": "C:\\none"}), "no cl.exe on PATH"),
        ("odd\n" + msvc.MARK + json.dumps({"PATH": r"C:\msvc\bin"}), "no INCLUDE, LIB; it said: odd"),
    ],
)
def test_vcvarsall_that_failed_says_why(made_up, output, trouble):
    found, said = msvc.parse_environment(output, made_up("win32", [r"C:\msvc\bin\cl.exe"]))
    assert found == {}
    assert trouble in said


def test_vcvarsall_starts_outside_of_the_prompt():
    environ = {
        "VSCMD_ARG_TGT_ARCH": "x86",
        "VSCMD_VER": "17.14",
        "__VSCMD_PREINIT_PATH": r"C:\Windows",
        "PATH": r"C:\vs\x86;C:\Windows",
        "INCLUDE": "i",
        "LIB": "l",
        "VCTOOLSVERSION": V2022,
        "VCINSTALLDIR": "v",
        "WINDOWSSDKVERSION": "10",
        "LIBRARY": "mine",
        "INCLUDES": "mine",
        "CUDA_PATH": "c",
    }
    assert msvc.environment_for_vcvarsall(environ) == {
        "PATH": r"C:\Windows",
        "LIBRARY": "mine",
        "INCLUDES": "mine",
        "CUDA_PATH": "c",
        "VSCMD_SKIP_SENDTELEMETRY": "1",
    }
    # outside of a prompt these are the user's own
    plain = {"PATH": "p", "INCLUDE": "mine", "PLATFORM": "MCD"}
    assert msvc.environment_for_vcvarsall(plain) == {**plain, "VSCMD_SKIP_SENDTELEMETRY": "1"}


# ---- the one place that runs them ------------------------------------------------------------------------------------


@pytest.fixture
def windows(monkeypatch, made_up):
    """windows(vcvarsall's output) -> what was run: a machine with Build Tools 2022, whose programs answer as told."""

    def pretend(output, with_vswhere=True):
        present = [cl(TOOLS_2022, V2022), *([VSWHERE] if with_vswhere else [])]
        ran = []

        def answer(command, environ):
            ran.append((command, environ))
            return 0, vswhere(TOOLS_2022) if command[0] == VSWHERE else output

        monkeypatch.setattr(tools, "_ask", answer)
        monkeypatch.setattr(tools, "real_files", lambda: made_up("win32", present))
        return ran

    return pretend


def test_visual_studio_found_and_its_environment_taken(windows):
    inside = {"Path": ntpath.dirname(cl(TOOLS_2022, V2022)), "INCLUDE": "i", "LIB": "l"}
    ran = windows(msvc.MARK + json.dumps(inside))
    found, environ = tools.visual_studio({"Path": "p"}, True, CUDA_13_0)
    assert found.toolset is not None
    assert found.toolset.version == V2022
    assert environ == {name.upper(): value for name, value in inside.items()}
    assert [command[0] if isinstance(command, list) else command[:7] for command, _ in ran] == [VSWHERE, "cmd.exe"]
    assert ran[1][1] == {"PATH": "p", "VSCMD_SKIP_SENDTELEMETRY": "1"}


def test_visual_studio_whose_vcvarsall_fails(windows):
    windows("[ERROR:vcvars.bat] init:FAILED\n")
    found, environ = tools.visual_studio({"PATH": "p"}, True, CUDA_13_0)
    assert (found.problem, found.detail) == ("vcvarsall-failed", "[ERROR:vcvars.bat] init:FAILED")
    assert environ == {"PATH": "p"}


def test_in_a_prompt_nothing_is_run(windows):
    ran = windows("")
    found, environ = tools.visual_studio({"VSCMD_ARG_TGT_ARCH": "x64"}, True, CUDA_13_0)
    assert (found.source, environ, ran) == ("prompt", {"VSCMD_ARG_TGT_ARCH": "x64"}, [])


def test_without_vswhere_nothing_is_run(windows):
    ran = windows("", with_vswhere=False)
    assert tools.visual_studio({}, True, CUDA_13_0)[0].problem == "msvc-missing"
    assert ran == []


TOOLKIT = r"C:\CUDA"
HEADER = "#if _MSC_VER < 1920 || _MSC_VER >= 1950\n"
CL_SAYS = """Microsoft (R) C/C++-Optimierungscompiler Version 19.44.35207.1 für x64
Copyright (C) Microsoft Corporation. Alle Rechte vorbehalten.

Syntax: cl [ Option... ] Dateiname... [ /link Linkeroption... ]
"""


def test_a_whole_machine_from_a_plain_powershell_to_cmakes_arguments(monkeypatch, made_up, tmp_path):
    """Everything but the programs is real: CUDA 13.0 beside Visual Studio 2022 and 2026, the user in a plain prompt."""
    parts = [ntpath.join(TOOLKIT, places[0]) for places in cuda.PARTS_WINDOWS.values()]
    present = {VSWHERE: "", cl(TOOLS_2022, V2022): "", cl(HOME_2026, V2026): "", **dict.fromkeys(parts, "")}
    present[TOOLKIT + r"\bin\nvcc.exe"] = ""
    present[TOOLKIT + r"\include\crt\host_config.h"] = HEADER
    inside = {"PATH": ntpath.dirname(cl(TOOLS_2022, V2022)), "INCLUDE": "i", "LIB": "l", "TEMP": "t"}
    answers = {
        VSWHERE: vswhere(TOOLS_2022, HOME_2026),
        "cl": CL_SAYS,
        "--version": "Cuda compilation tools, release 13.0, V13.0.88\n",
        "--list-gpu-arch": "compute_75\ncompute_89\ncompute_120\n",
    }

    def answer(command, environ):
        if isinstance(command, str):
            assert f'{TOOLS_2022[0]}\\VC\\Auxiliary\\Build\\vcvarsall.bat" x64 -vcvars_ver={V2022}' in command
            return 0, msvc.MARK + json.dumps(inside)
        if command == [cl(TOOLS_2022, V2022)]:
            assert environ == inside
            return 2, answers["cl"]
        if "cmake" in command[0] or "ninja" in command[0]:
            return 0, "cmake version 4.1.0" if "cmake" in command[0] else "1.13.0"
        return 0, answers[command[0] if command[0] in answers else command[1]]

    def which(name, path=None):
        if name in ("cmake", "ninja"):
            return rf"C:\venv\Scripts\{name}.exe"
        return cl(TOOLS_2022, V2022) if name == "cl" and path == inside["PATH"] else None

    monkeypatch.setattr(tools, "_ask", answer)
    monkeypatch.setattr(tools, "real_files", lambda: made_up("win32", present))
    monkeypatch.setattr(tools.shutil, "which", which)
    monkeypatch.setattr(tools.sysconfig, "get_path", lambda name: r"C:\Python\Scripts")
    monkeypatch.setattr(facts, "free_memory", lambda: 64 << 30)
    monkeypatch.setattr(facts, "driver_version", lambda: "present")
    monkeypatch.setattr(facts.platform_module, "machine", lambda: "AMD64")
    monkeypatch.setattr("sys.platform", "win32")
    environ = {"CUDA_PATH": TOOLKIT, "PATH": r"C:\Windows", "TORCH_CUDA_ARCH_LIST": "89"}
    seen = facts.gather(tmp_path, environ)
    made = plan.make_plan(read_config(environ), seen, "2.4.0")

    assert not made.fatal
    assert seen.compiler == tools.Tool(cl(TOOLS_2022, V2022), "19.44.35207.1", "x64")
    assert seen.msc_ver_range == CUDA_13_0
    assert made.wheel == "mamba_ssm-2.4.0+cu130-py3-none-win_amd64.whl"
    assert "Visual Studio Build Tools 2022, toolset 14.44.35207 (found by vswhere)" in made.as_text()
    words = cmake.arguments(made, environ)
    assert f"-DCMAKE_CXX_COMPILER={cl(TOOLS_2022, V2022)}".replace("\\", "/") in words
    assert "-DCMAKE_CUDA_COMPILER=C:/CUDA/bin/nvcc.exe" in words
    assert cmake.environment(made, environ) == {**inside, "VSLANG": "1033"}
