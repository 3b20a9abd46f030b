"""What the plan says on Windows: each finding with its code, its severity and a cure that works in PowerShell."""

import ntpath

import pytest
from wheel_build import advice, cmake, cuda, facts, msvc, plan, preflight_windows
from wheel_build.config import read_config

CL = facts.Tool(r"C:\VS (x)\VC\Tools\MSVC\14.44.35207\bin\Hostx64\x64\cl.exe", "19.44.35207.1", "x64")
CL_2026 = facts.Tool(r"C:\VS26\cl.exe", "19.50.35717", "x64")
CL_2017 = facts.Tool(r"C:\VS17\cl.exe", "19.16.27051", "x64")
TOOLS_2022 = msvc.Studio("Visual Studio Build Tools 2022", r"C:\VS (x)", "17.14")
FOUND = msvc.Discovery("vswhere", msvc.Toolset(TOOLS_2022, "14.44.35207"))
NVCC = cuda.Nvcc(r"C:\Program Files\NVIDIA GPU Computing Toolkit\CUDA\v13.0\bin\nvcc.exe", "CUDA_PATH")
WITHOUT_NVCC = {
    "discovery": cuda.Discovery(None),
    "nvcc_version": None,
    "nvcc_architectures": (),
    "msc_ver_range": None,
}


@pytest.fixture
def windows(machine):
    """Facts of a healthy Windows machine with CUDA 13.0; keywords change single facts."""
    return lambda **changes: machine(
        **{
            "platform": "win32",
            "machine": "AMD64",
            "root": r"C:\src\mamba",
            "temp": r"C:\Users\me\AppData\Local\Temp",
            "compiler": CL,
            "msvc": FOUND,
            "discovery": cuda.Discovery(NVCC),
            "msc_ver_range": (1920, 1950),
            "environment": {"PATH": "p", "INCLUDE": "i"},
            **changes,
        }
    )


def plan_of(environ, seen):
    return plan.make_plan(read_config(environ), seen, "2.4.0")


def trouble(problem, detail="", **more):
    return {"msvc": msvc.Discovery(problem=problem, detail=detail, **more), "compiler": None}


TOOLSETS = (msvc.Toolset(TOOLS_2022, "14.44.35207"),)
ALLOW = {"NVCC_PREPEND_FLAGS": "-allow-unsupported-compiler"}
REFUSED = {"compiler": CL_2026, "msvc": msvc.Discovery("prompt")}

# environment, changed facts, code, severity, what the fact and the cure must name
FINDINGS = [
    ({}, trouble("msvc-missing"), "msvc-missing", "fatal", ["cl,", "winget install", "Visual Studio 2022 Build Tools"]),
    (
        {},
        trouble("msvc-without-cpp", studios=(TOOLS_2022,)),
        "msvc-without-cpp",
        "fatal",
        ["Build Tools 2022", "Modify", r'--installPath "C:\VS (x)"', "${env:ProgramFiles(x86)}"],
    ),
    (
        {},
        trouble("toolset-missing", "14.3", toolsets=TOOLSETS),
        "toolset-missing",
        "fatal",
        ["14.3", "14.44.35207", "Remove-Item Env:VCToolsVersion"],
    ),
    (
        {},
        trouble("host-compiler-foreign", "F:\\cl.exe", toolsets=TOOLSETS),
        "host-compiler-foreign",
        "fatal",
        ["cl.exe", "14.44.35207", "Remove-Item Env:CUDAHOSTCXX"],
    ),
    (
        {},
        {"msvc": msvc.Discovery("vswhere", TOOLSETS[0], "vcvarsall-failed", "init:FAILED"), "compiler": None},
        "vcvarsall-failed",
        "fatal",
        ["Build Tools 2022", "init:FAILED", "x64 Native Tools"],
    ),
    (
        {},
        {"msvc": msvc.Discovery("DISTUTILS_USE_SDK"), "compiler": None},
        "compiler-missing",
        "fatal",
        ["DISTUTILS_USE_SDK", "plain PowerShell"],
    ),
    ({"CXX": "banana"}, {"compiler": None}, "compiler-missing", "fatal", ["CXX is 'banana'"]),
    (
        {},
        {"compiler": facts.Tool(r"C:\cl.exe", "19.44.1", "x86"), "msvc": msvc.Discovery("PATH")},
        "compiler-not-x64",
        "fatal",
        ["x86", "x64 Native Tools"],
    ),
    ({}, {"compiler": CL_2017, "msc_ver_range": (1910, 1940)}, "compiler-too-old", "fatal", ["19.16.27051", "19.25"]),
    ({}, {"compiler": CL_2017, **WITHOUT_NVCC, "driver": ""}, "compiler-too-old", "fatal", ["19.16.27051"]),
    # both versions, and the two ways out
    (
        {},
        REFUSED,
        "compiler-refused",
        "fatal",
        [
            "nvcc 13.0.88",
            "19.50.35717",
            "Visual Studio 2026",
            "19.20 to 19.49",
            "2019 to Visual Studio 2022",
            "Build Tools",
            "13.2",
            '$env:NVCC_PREPEND_FLAGS = "-allow-unsupported-compiler"',
        ],
    ),
    (
        {},
        {**REFUSED, "msvc": msvc.Discovery("vswhere", TOOLSETS[0], toolsets=TOOLSETS)},
        "compiler-refused",
        "fatal",
        ["Remove-Item Env:VCToolsVersion", "14.44.35207"],
    ),
    (
        {},
        {"compiler": CL, "msc_ver_range": (1910, 1940)},
        "compiler-refused",
        "fatal",
        ["19.44.35207", "19.10 to 19.39", "14.39 or older", "CUDA 12.4"],
    ),
    (
        {},
        {"compiler": facts.Tool("cl", "19.29.30133", "x64"), "msc_ver_range": (1930, 1970)},
        "compiler-refused",
        "fatal",
        ["2019", "can be installed beside yours"],
    ),
    (ALLOW, REFUSED, "compiler-refused", "warning", ["as told"]),
    ({"CUDAFLAGS": "--allow-unsupported-compiler -O3"}, REFUSED, "compiler-refused", "warning", ["as told"]),
    (
        {},
        {"msvc": msvc.Discovery("vswhere", TOOLSETS[0], left_prompt="x86")},
        "prompt-passed-over",
        "note",
        ["x86", "x64 Native Tools"],
    ),
    ({"CUDAHOSTCXX": r"C:\gone\cl.exe"}, {}, "host-compiler-wrong", "fatal", ["gone", "unset"]),
    (
        {},
        {"nvcc_missing_parts": ("the static runtime (lib\\x64\\cudart_static.lib)",)},
        "toolkit-incomplete",
        "fatal",
        ["cudart_static.lib", "CUDA installer", "nvcc.exe"],
    ),
    ({}, {"torch": "2.13.0+cpu"}, "torch-cpu-only", "note", ["2.13.0+cpu", "fine, the build needs no torch"]),
    ({"CL": "/MD"}, {}, "flag-conflict", "fatal", ["CL holds /MD", "Remove-Item Env:CL"]),
    ({"_CL_": "/O1 -MDd"}, {}, "flag-conflict", "fatal", ["_CL_ holds -MDd"]),
    ({"CXXFLAGS": "/DX /MTd"}, {}, "flag-conflict", "fatal", ["CXXFLAGS holds /MTd"]),
    ({"CUDAFLAGS": "-Xcompiler=/W4,/MD"}, {}, "flag-conflict", "fatal", ["CUDAFLAGS holds /MD"]),
    ({"NVCC_APPEND_FLAGS": "-Xcompiler /Zc:preprocessor-"}, {}, "flag-conflict", "fatal", ["/Zc:preprocessor-"]),
    ({}, {"root": "C:\\" + "long\\" * 26}, "path-long", "warning", ["260", r"setup.py build -b C:\b"]),
    ({}, {"root": r"C:\Users\Jürgen\mamba"}, "path-not-ascii", "warning", ["Jürgen", "$env:TEMP = "]),
    ({}, {"temp": r"C:\Users\Łukasz\Temp"}, "path-not-ascii", "warning", ["Łukasz"]),
    (
        {},
        {"libraries_in_use": (r"C:\src\mamba\mamba_ssm\lib\mamba_cpu.dll",)},
        "library-in-use",
        "warning",
        ["mamba_cpu.dll", "LNK1104", "Get-Process"],
    ),
    ({"MAMBA_SSM_CUDA": "on"}, WITHOUT_NVCC, "nvcc-missing", "fatal", ['$env:MAMBA_SSM_CUDA = "on"; pip wheel']),
    ({}, {**WITHOUT_NVCC, "driver": "present"}, "nvcc-missing-with-driver", "fatal", ['`$env:MAMBA_SSM_CUDA = "off"`']),
    ({}, WITHOUT_NVCC, "cuda-left-out", "warning", ['`$env:MAMBA_SSM_CUDA = "off"`']),
]


@pytest.mark.parametrize(("environ", "changes", "code", "severity", "named"), FINDINGS)
def test_finding(windows, environ, changes, code, severity, named):
    found = plan_of(environ, windows(**changes)).findings
    codes = [finding.code for finding in found if finding.code != "cuda-left-out" or code == "cuda-left-out"]
    assert codes == [code]
    (finding,) = (finding for finding in found if finding.code == code)
    assert finding.severity == severity
    for words in named:
        assert words in f"{finding.fact} {finding.cure}"


HEALTHY = [
    ({}, {}),
    ({}, {"msvc": msvc.Discovery("prompt")}),
    ({}, {"msvc": msvc.Discovery("PATH")}),
    ({}, {"compiler": CL_2026, "msc_ver_range": (1920, 1960)}),
    ({}, {"compiler": CL_2026, "msc_ver_range": None}),
    ({"CXX": "clang-cl"}, {"compiler": facts.Tool("clang-cl", "19.1.0")}),
    ({"MAMBA_SSM_CUDA": "off"}, {"compiler": CL_2026, **WITHOUT_NVCC}),
    (
        {"MAMBA_SSM_CUDA": "off", "CXX": "clang-cl"},
        {"compiler": facts.Tool("clang-cl", "19.1.0"), **WITHOUT_NVCC, "msvc": msvc.Discovery(problem="msvc-missing")},
    ),
    ({"MAMBA_SSM_CUDA": "off"}, {"root": r"C:\Users\Jürgen\mamba", **WITHOUT_NVCC}),
    ({"CXXFLAGS": "/MT /MP /DMD -I/MDx -Ilib/MD", "CL": "/Zc:preprocessor"}, {}),
    ({"CUDAHOSTCXX": CL.path}, {"cuda_host": CL.path}),
    ({}, {"torch": "2.13.0+cu130", "torch_cuda": "13.0"}),
    ({}, {"root": r"D:\daten (neu)\mamba"}),
]


@pytest.mark.parametrize(("environ", "changes"), HEALTHY)
def test_nothing_to_find(windows, environ, changes):
    assert plan_of(environ, windows(**changes)).findings == ()


def test_findings_of_windows_are_not_said_elsewhere(machine):
    seen = machine(torch="2.13.0+cu130", torch_cuda="13.0", root="/" + "long/" * 60, temp="/tmp/ü")
    assert plan_of({"CL": "/MD"}, seen).findings == ()


@pytest.mark.parametrize(
    ("platform", "command", "variables", "text"),
    [
        ("win32", "pip wheel .", {"A": "on", "B": "7.5;8.6"}, '$env:A = "on"; $env:B = "7.5;8.6"; pip wheel .'),
        ("linux", "pip wheel .", {"A": "on", "B": "7.5;8.6"}, "A=on B='7.5;8.6' pip wheel ."),
        ("win32", "", {"A": "off"}, '$env:A = "off"'),
        ("linux", "", {"A": "off"}, "A=off"),
    ],
)
def test_hints_are_written_for_the_users_shell(platform, command, variables, text):
    assert advice.with_variables(platform, command, **variables) == text


# ---- the plan and CMake ----------------------------------------------------------------------------------------------


def test_plan_says_which_visual_studio(windows):
    assert "Visual Studio Build Tools 2022, toolset 14.44.35207" in plan_of({}, windows()).as_text()
    for source in ("prompt", "DISTUTILS_USE_SDK", "PATH"):
        text = plan_of({}, windows(msvc=msvc.Discovery(source))).as_text()
        assert f"Visual Studio  {plan.WITHOUT_VSWHERE[source]}" in text


def test_cmake_gets_cl_and_the_host_compiler_by_path(windows):
    words = cmake.arguments(plan_of({}, windows()), {})
    assert f"-DCMAKE_CXX_COMPILER={CL.path}".replace("\\", "/") in words
    assert not [word for word in words if "HOST_COMPILER" in word]
    environ = {"CUDAHOSTCXX": CL.path, "CXX": "clang-cl"}
    words = cmake.arguments(plan_of(environ, windows(cuda_host=CL.path)), environ)
    assert f"-DCMAKE_CUDA_HOST_COMPILER={CL.path}".replace("\\", "/") in words
    assert not [word for word in words if "CXX_COMPILER" in word]


def test_cmake_runs_in_the_environment_of_vcvarsall(windows):
    variables = cmake.environment(plan_of({}, windows()), {"PATH": "outside", "LIB": "outside"})
    assert variables == {"PATH": "p", "INCLUDE": "i", "VSLANG": "1033"}
    variables = cmake.environment(plan_of({}, windows(environment={"VSLANG": "1031"})), {})
    assert variables == {"VSLANG": "1031"}


def test_another_compiler_builds_in_another_folder(windows, tmp_path):
    seen = [windows(), windows(compiler=CL_2026, msc_ver_range=None), windows(compiler=None)]
    environs = [{}, ALLOW, {"_CL_": "/O1"}]
    folders = {cmake.build_folder(tmp_path, plan_of({}, facts), environ) for facts in seen for environ in environs}
    assert len(folders) == 9


def test_build_folder_that_is_too_deep_stops_before_cmake(windows, tmp_path, monkeypatch):
    monkeypatch.setattr(cmake, "_call", lambda *words: pytest.fail("CMake was called"))
    deep = tmp_path / ("x" * 120)
    with pytest.raises(cmake.BuildError, match=r"260 characters.*build -b C:"):
        cmake.build(plan_of({}, windows(cmake=facts.Tool("cmake"))), tmp_path, deep, {})


@pytest.mark.parametrize(("length", "long"), [(0, False), (158, False), (159, True)])
def test_how_long_a_build_folder_may_be(length, long):
    folder = ntpath.join("C:\\", "x" * (length - 3))[:length]
    assert preflight_windows.path_too_long(folder) == long


def test_a_plan_with_any_path_can_be_printed(monkeypatch):
    """pip reads the output through a pipe, in the system's code page, which may lack the user's own name."""

    class Pipe:
        encoding = "ascii"
        written = ""

        def write(self, text):
            self.written += text.encode(self.encoding).decode()

        def flush(self):
            pass

    pipe = Pipe()
    monkeypatch.setattr("sys.stdout", pipe)
    plan.show("C:\\Users\\Łukasz")
    assert pipe.written == "C:\\Users\\\\u0141ukasz\n"


def test_a_library_in_use_stops_with_the_reason(tmp_path, monkeypatch):
    """What Windows answers when a DLL that a Python has loaded is replaced: WinError 5."""
    pytest.importorskip("setuptools", minversion="77")
    from wheel_build import commands

    source, target = tmp_path / "new.dll", tmp_path / "mamba_cpu.dll"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    def refuse(*_, **__):
        raise PermissionError(13, "Access is denied")

    monkeypatch.setattr(commands.os, "replace", refuse)
    with pytest.raises(SystemExit, match=r"mamba_cpu\.dll is in use by a running Python"):
        commands.replace_file(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mamba_cpu.dll", "new.dll"]
    monkeypatch.setattr(commands.Path, "unlink", refuse)
    with pytest.raises(SystemExit, match=r"mamba_cpu\.dll is in use by a running Python"):
        commands.remove_file(target)
