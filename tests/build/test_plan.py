"""The plan: findings with stable codes, jobs, version, label, wheel name, CMake arguments, `setup.py configure`."""

import json
import os
import subprocess
import sys

import pytest
from wheel_build import cmake, cuda, facts, tools, version
from wheel_build.config import read_config
from wheel_build.plan import make_plan, more_requirements, plan_jobs

GIB = 1 << 30
KEYS = {"cuda", "architectures", "dtypes", "jobs", "nvcc_threads", "version", "wheel", "findings"}


def plan_of(environ, machine, **options):
    return make_plan(read_config(environ), machine, "2.4.0", **options)


def codes(plan, severity=None):
    return [finding.code for finding in plan.findings if severity in (None, finding.severity)]


def test_healthy_machine_has_no_findings(machine):
    plan = plan_of({}, machine())
    assert plan.findings == ()
    assert plan.cuda
    assert plan.wheel == "mamba_ssm-2.4.0+cu130-py3-none-linux_x86_64.whl"
    assert plan.libraries == ["libmamba_cpu.so", "libmamba_cuda.so"]
    assert set(plan.as_dict()) >= KEYS


# environment, changed facts ("no nvcc" stands for those of a machine without one), code, severity
FINDINGS = [
    ({"MAMBA_SSM_CUDA": "on"}, "no nvcc", "nvcc-missing", "fatal"),
    ({}, "no nvcc", "cuda-left-out", "warning"),
    ({"MAMBA_SSM_CUDA": "auto"}, "no nvcc", "cuda-left-out", "note"),
    ({"MAMBA_SSM_CUDA": "auto"}, "no nvcc, driver", "nvcc-missing-with-driver", "fatal"),
    ({}, "no nvcc, driver", "nvcc-missing-with-driver", "fatal"),
    ({}, {"nvcc_version": (11, 8), "nvcc_full_version": "11.8.89"}, "nvcc-too-old", "fatal"),
    ({}, {"nvcc_version": None, "nvcc_trouble": "does not answer"}, "nvcc-broken", "fatal"),
    ({}, {"nvcc_trouble": "#error -- unsupported GNU version!"}, "compiler-refused", "fatal"),
    ({"TORCH_CUDA_ARCH_LIST": "native"}, {}, "native-without-gpu", "fatal"),
    ({"TORCH_CUDA_ARCH_LIST": "7.0"}, {}, "architecture-unknown", "fatal"),
    ({"TORCH_CUDA_ARCH_LIST": "banana"}, {}, "switch-invalid", "fatal"),
    ({"TORCH_CUDA_ARCH_LIST": "banana", "MAMBA_SSM_CUDA": "off"}, {}, "switch-invalid", "fatal"),
    ({"MAX_JOBS": "0"}, {}, "switch-invalid", "fatal"),
    ({"MAMBA_FORCE_BUILD": "TRUE"}, {}, "switch-without-effect", "note"),
    ({"MAMBA_SSM_CUD": "off"}, {}, "switch-unknown", "warning"),
    ({"MM_XYZ": "1"}, {}, "switch-unknown", "note"),
    ({}, {"nvcc_architectures": (75, 80, 90), "nvcc_version": (12, 4)}, "architectures-left-out", "note"),
    ({}, {"compiler": None}, "compiler-missing", "fatal"),
    ({}, {"compiler": None, "platform": "win32"}, "compiler-missing", "fatal"),
    ({}, {"cmake": None}, "cmake-missing", "fatal"),
    ({}, {"cmake": facts.Tool("/usr/bin/cmake", "3.25.1")}, "cmake-too-old", "fatal"),
    ({}, {"ninja": None}, "ninja-missing", "fatal"),
    ({}, {"memory": 2 * GIB}, "memory-low", "warning"),
    ({}, {"memory": GIB // 4}, "memory-low", "fatal"),
    ({}, {"disk": GIB // 4}, "disk-low", "warning"),
    ({}, {"disk": GIB // 16}, "disk-low", "fatal"),
    ({"MAMBA_SSM_CUDA": "off"}, {"disk": GIB // 16}, "disk-low", "warning"),
    ({}, {"writable": False}, "folder-unwritable", "fatal"),
    *(({}, {"root": f"/src/a{char}b"}, "path-special", "fatal") for char in "\";,|\\\n'$`"),
    *(({}, {"temp": f"/tmp/a{char}b"}, "path-special", "fatal") for char in " (),'$"),
    ({}, {"machine": "aarch64"}, "platform-unsupported", "fatal"),
    ({}, {"platform": "darwin"}, "platform-unsupported", "fatal"),
    ({}, {"platform": "win32", "root": "C:\\" + "long\\" * 40}, "path-long", "warning"),
    ({}, {"discovery": cuda.Discovery(None, (("CUDACXX", "/gone"),))}, "nvcc-path-wrong", "fatal"),
]


@pytest.mark.parametrize(("environ", "changes", "code", "severity"), FINDINGS)
def test_finding(machine, without_nvcc, environ, changes, code, severity):
    if isinstance(changes, str):
        changes = {**without_nvcc, **({"driver": "580.65.06"} if "driver" in changes else {})}
    plan = plan_of(environ, machine(**changes))
    assert codes(plan) == [code]
    finding = plan.findings[0]
    assert finding.severity == severity
    assert finding.fact
    assert finding.cure
    assert plan.fatal == (severity == "fatal")
    assert f"[{code}]" in plan.as_text()


@pytest.mark.parametrize("path", ["/src/ä b (ü)/日本", "/src/a&b#c%d[e]=f", "C:\\a;b"])
def test_path_that_can_be_built_below(machine, path):
    assert codes(plan_of({}, machine(root=path, platform="win32" if path[0] == "C" else "linux"))) == []


def test_path_that_only_nvcc_cannot_take(machine):
    assert codes(plan_of({"MAMBA_SSM_CUDA": "off"}, machine(root="/home/o'hara/mamba", temp="/tmp/o'hara"))) == []


def test_wrong_cuda_home_is_a_warning_beside_the_nvcc_found(machine):
    nvcc = cuda.Nvcc("/usr/bin/nvcc", "PATH")
    plan = plan_of({}, machine(discovery=cuda.Discovery(nvcc, (("CUDA_HOME", "/gone"),))))
    assert codes(plan, "warning") == ["nvcc-path-wrong"]
    assert plan.cuda


def test_driver_without_nvcc_names_three_cures(machine, without_nvcc):
    cure = plan_of({}, machine(driver="580", **without_nvcc)).findings[0].cure
    assert "CUDA toolkit" in cure
    assert "MAMBA_SSM_CUDA=on" in cure
    assert "MAMBA_SSM_CUDA=off" in cure


@pytest.mark.parametrize(
    ("word", "nvcc", "fatal"),
    [("", False, True), ("auto", False, False), ("off", False, False), ("", True, False), ("on", True, False)],
)
def test_under_pip_a_cpu_only_wheel_must_be_asked_for(machine, without_nvcc, word, nvcc, fatal):
    """pip shows what a build prints only if it fails: a warning would go unseen."""
    plan = plan_of({"MAMBA_SSM_CUDA": word}, machine(**({} if nvcc else without_nvcc)))
    assert not plan.fatal
    assert plan.unseen().fatal == fatal
    if fatal:
        assert all(f"MAMBA_SSM_CUDA={cure}" in plan.unseen().as_text() for cure in ("off", "auto", "on"))


def test_backend_stops_where_pip_would_hide_the_warning(machine, without_nvcc, monkeypatch, capsys):
    pytest.importorskip("setuptools")
    from wheel_build import backend

    built = []
    monkeypatch.setattr(backend.commands, "both_wheels", True)
    monkeypatch.setattr(backend.build_meta, "build_wheel", lambda *words: built.append(words) or "a.whl")
    monkeypatch.setattr(backend, "load", lambda root: plan_of(switches, machine(**without_nvcc)))
    switches = {}
    with pytest.raises(SystemExit, match="the build stops here"):
        backend.build_wheel("dist")
    assert "FATAL [cuda-left-out] no nvcc was found: THE WHEEL IS CPU-ONLY" in capsys.readouterr().out
    assert built == []
    switches = {"MAMBA_SSM_CUDA": "off"}
    assert backend.build_wheel("dist") == "a.whl"
    assert not backend.commands.both_wheels


def test_advice_about_compilers_has_one_form(machine):
    missing, refused = (
        plan_of({}, machine(**changes)).findings[0].cure
        for changes in ({"compiler": None}, {"nvcc_trouble": "#error -- unsupported GNU version!"})
    )
    for cure, name in ((missing, "g++"), (refused, "g++-12")):
        assert cure.startswith("install a C++ compiler")
        assert f"such as {name} (on Debian and Ubuntu: apt install {name}), " in cure
        assert " set CXX to " in cure


def test_off_asks_nothing_of_cuda(machine, without_nvcc):
    plan = plan_of({"MAMBA_SSM_CUDA": "off"}, machine(driver="580", **without_nvcc))
    assert plan.findings == ()
    assert plan.as_dict()["architectures"] == []
    assert plan.wheel == "mamba_ssm-2.4.0+cpu-py3-none-linux_x86_64.whl"
    assert plan.libraries == ["libmamba_cpu.so"]
    # ... also where nvcc is there
    assert not plan_of({"MAMBA_SSM_CUDA": "off"}, machine()).cuda


def test_ninja_is_not_needed_with_another_generator(machine):
    assert plan_of({}, machine(ninja=None), other_generator=True).findings == ()


def test_windows_plan(machine):
    plan = plan_of({"TORCH_CUDA_ARCH_LIST": "75;86;89;120", "NVCC_THREADS": "8"}, machine(platform="win32"))
    assert plan.wheel == "mamba_ssm-2.4.0+cu130-py3-none-win_amd64.whl"
    assert plan.libraries == ["mamba_cpu.dll", "mamba_cuda.dll"]
    assert plan.nvcc_threads == 8


# cuda, NVCC_THREADS, MAX_JOBS, architectures, cores, memory in GiB -> jobs, nvcc threads
JOBS = [
    (False, None, None, 0, 2, 24, 2, 1),
    (False, None, None, 0, 64, 8, 8, 1),
    (True, None, None, 1, 2, 24, 2, 1),
    (True, None, None, 7, 2, 24, 1, 7),
    (True, None, None, 7, 2, 6, 1, 2),
    (True, None, None, 12, 16, 256, 2, 8),
    (True, None, None, 7, 64, 512, 10, 7),
    (True, None, None, 1, 16, 12, 4, 1),
    (True, 4, None, 7, 16, 256, 4, 4),
    (True, 8, None, 1, 4, 256, 4, 8),
    (True, None, 3, 7, 64, 512, 3, 7),
    (True, None, None, 1, 1, 1, 1, 1),
    (True, None, None, 2, 4, None, 2, 2),
]


@pytest.mark.parametrize(("cuda_on", "threads", "most", "architectures", "cores", "memory", "jobs", "nvcc"), JOBS)
def test_jobs(cuda_on, threads, most, architectures, cores, memory, jobs, nvcc):
    environ = {"NVCC_THREADS": str(threads or ""), "MAX_JOBS": str(most or "")}
    free = None if memory is None else memory * GIB
    assert plan_jobs(read_config(environ), cuda_on, architectures, cores, free)[:2] == (jobs, nvcc)


@pytest.mark.parametrize(
    ("chosen", "cuda_on", "nvcc", "debug", "label"),
    [
        ("", True, (13, 0), False, "cu130"),
        ("", True, (12, 9), False, "cu129"),
        ("", False, (13, 0), False, "cpu"),
        ("", False, None, False, "cpu"),
        ("mine.1", True, (13, 0), False, "mine.1"),
        ("", True, (13, 0), True, "cu130.debug"),
        ("", False, None, True, "cpu.debug"),
        ("mine.1", True, (13, 0), True, "mine.1.debug"),
    ],
)
def test_label(chosen, cuda_on, nvcc, debug, label):
    assert version.local_label(chosen, cuda_on, nvcc, debug) == label
    assert version.wheel_version("2.4.0", label, from_sdist=False) == f"2.4.0+{label}"
    assert version.wheel_version("2.4.0", label, from_sdist=True) == "2.4.0"


@pytest.mark.parametrize(
    ("platform", "machine_name", "tag"),
    [
        ("linux", "x86_64", "linux_x86_64"),
        ("win32", "AMD64", "win_amd64"),
        ("win32", "ARM64", "win_arm64"),
        ("linux", "aarch64", "linux_aarch64"),
    ],
)
def test_tag(platform, machine_name, tag):
    assert version.wheel_tag(platform, machine_name) == ("py3", "none", tag)


def test_debug_wheel_does_not_have_the_name_of_the_other(machine):
    assert plan_of({"DEBUG": "1"}, machine()).wheel == "mamba_ssm-2.4.0+cu130.debug-py3-none-linux_x86_64.whl"


def test_sdist_keeps_its_version_and_says_so(machine):
    for switches in ({"MAMBA_LOCAL_VERSION": "mine"}, {"DEBUG": "1"}):
        plan = plan_of(switches, machine(), from_sdist=True)
        assert plan.version == "2.4.0"
        assert codes(plan, "note") == ["label-unused"]


def test_version_is_written_once(root):
    assert version.base_version(root) == "2.4.0"


def test_cmake_arguments_carry_the_plan(machine):
    environ = {"TORCH_CUDA_ARCH_LIST": "7.5;12.0+PTX", "MM_DISABLE_HALF": "1", "CMAKE_ARGS": "-DMAMBA_BUILD_TESTS=ON"}
    words = cmake.arguments(plan_of(environ, machine()), {})
    assert "-DMAMBA_CUDA=ON" in words
    assert "-DCMAKE_CUDA_ARCHITECTURES=75-real;120-real;120-virtual" in words
    assert "-DMAMBA_DISABLE_HALF=ON" in words
    assert "-DMAMBA_DISABLE_BF16=OFF" in words
    assert words[-1] == "-DMAMBA_BUILD_TESTS=ON"
    windows = machine(platform="win32", discovery=cuda.Discovery(cuda.Nvcc(r"C:\CUDA\bin\nvcc.exe", "CUDA_PATH")))
    assert "-DCMAKE_CUDA_COMPILER=C:/CUDA/bin/nvcc.exe" in cmake.arguments(plan_of({}, windows), {})


def test_a_failure_names_the_users_variables(machine, tmp_path, monkeypatch):
    """What cmake and the compilers say does not tell where a flag came from."""
    monkeypatch.setattr(cmake.subprocess, "call", lambda *words, **options: 1)
    environ = {"CMAKE_ARGS": "-DX=1", "CXXFLAGS": "-fno-exceptions"}
    words = r"cmake failed with exit status 1.*CMAKE_ARGS='-DX=1', CXXFLAGS='-fno-exceptions'.*build without it"
    with pytest.raises(cmake.BuildError, match=words):
        cmake.build(plan_of(environ, machine()), tmp_path, tmp_path, environ)
    with pytest.raises(cmake.BuildError, match=r"its messages stand above$"):
        cmake.build(plan_of({}, machine()), tmp_path, tmp_path, {})


def test_each_configuration_builds_in_its_own_folder(machine, tmp_path):
    environs = [{}, {"MAMBA_SSM_CUDA": "off"}, {"TORCH_CUDA_ARCH_LIST": "86"}, {"DEBUG": "1"}, {"MM_DISABLE_BF16": "1"}]
    folders = {cmake.build_folder(tmp_path, plan_of(environ, machine()), {}) for environ in environs}
    folders.add(cmake.build_folder(tmp_path, plan_of({}, machine()), {"CXXFLAGS": "-march=native"}))
    assert len(folders) == len(environs) + 1
    # how many jobs compile does not matter
    assert cmake.build_folder(tmp_path, plan_of({"MAX_JOBS": "1", "NVCC_THREADS": "2"}, machine()), {}) in folders


def configure(root, environ, *words, python=()):
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "MAMBA", "MM_", "TORCH_"))
    }
    command = [sys.executable, *python, str(root / "setup.py"), "configure", *words]
    return subprocess.run(command, env={**clean, **environ}, capture_output=True, text=True)


def test_configure_needs_the_standard_library_only_and_prints_pure_json(root):
    done = configure(root, {"MAMBA_SSM_CUDA": "off"}, "--json", python=["-S"])
    plan = json.loads(done.stdout)
    assert set(plan) >= KEYS
    assert plan["cuda"] is False
    assert plan["version"].endswith("+cpu") or version.is_sdist(root)
    fatal = [finding for finding in plan["findings"] if finding["severity"] == "fatal"]
    assert done.returncode == (1 if fatal else 0)
    assert all(set(finding) == {"code", "severity", "fact", "cure"} for finding in plan["findings"])


def test_configure_exits_1_and_names_the_wrong_switch(root):
    done = configure(root, {"MAMBA_SSM_CUDA": "off", "MAX_JOBS": "many"})
    assert done.returncode == 1
    assert "FATAL [switch-invalid] MAX_JOBS is 'many'" in done.stdout
    assert configure(root, {}, "--jsn").returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvcc is a shell script")
def test_configure_with_a_stand_in_for_nvcc(root, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\ncase "$1" in\n--version) echo "Cuda compilation tools, release 12.4, V12.4.131" ;;\n'
        "--list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n' ;;\nesac\n"
    )
    nvcc.chmod(0o755)
    plan = json.loads(configure(root, {"CUDACXX": str(nvcc)}, "--json").stdout)
    assert plan["cuda"] is True
    assert plan["architectures"] == ["75-real", "80-real", "90-virtual", "90a-real"]
    assert plan["tools"]["nvcc"] == {"path": str(nvcc), "version": "12.4.131", "source": "CUDACXX"}
    assert "+cu124-" in plan["wheel"] or version.is_sdist(root)
    same = [
        configure(root, {"CUDACXX": str(nvcc), "TORCH_CUDA_ARCH_LIST": text}, "--json") for text in ("75;90", "7.5;9.0")
    ]
    assert same[0].stdout == same[1].stdout


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvcc is a shell script")
def test_nvcc_that_names_no_architecture_is_broken(root, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 12.4, V12.4.131"\n')
    nvcc.chmod(0o755)
    done = configure(root, {"CUDACXX": str(nvcc)})
    assert done.returncode == 1
    assert f"FATAL [nvcc-broken] {nvcc} --list-gpu-arch does not answer as nvcc does; it says: nothing" in done.stdout


def test_compiler_with_an_open_quote_is_no_program(root):
    done = configure(root, {"MAMBA_SSM_CUDA": "off", "CXX": 'g++ "'})
    assert done.returncode == 1
    assert "FATAL [compiler-missing] CXX is 'g++ \"', which is no program" in done.stdout


def test_nvcc_from_pypi_is_required_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(tools, "discover", lambda environ: cuda.Discovery(None))
    assert more_requirements({"MAMBA_SSM_CUDA": "on"}) == list(cuda.NVCC_WHEELS)
    assert more_requirements({}) == more_requirements({"MAMBA_SSM_CUDA": "off"}) == []
    wrong = cuda.Discovery(None, (("CUDACXX", "/gone"),))
    monkeypatch.setattr(tools, "discover", lambda environ: wrong)
    assert more_requirements({"MAMBA_SSM_CUDA": "on"}) == []
