"""What the tests of the verifier share: one real wheel, and wheels with CUDA and for Windows made out of it."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

TARGETS = ["75-real", "90a-real", "120-real", "120-virtual"]


@pytest.fixture(scope="session")
def real_wheel(tmp_path_factory, request):
    """A release build of the CPU library, without optimisation (15 seconds on two cores)."""
    if sys.platform != "linux" or shutil.which("c++") is None:
        pytest.skip("builds a Linux wheel with a C++ compiler")
    for name in ("setuptools", "cmake", "ninja"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed here")
    import fcntl

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # one wheel for all processes of this run
    with open(folder / "real_wheel.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list((folder / "real_wheel").glob("dist/mamba_ssm-*.whl")):
            _build(folder / "real_wheel", request.config.rootpath)
    (found,) = (folder / "real_wheel").glob("dist/mamba_ssm-*.whl")
    return found


def _build(source, root):
    shutil.rmtree(source, ignore_errors=True)  # of a process that failed
    ignored = shutil.ignore_patterns("lib", "__pycache__", "*.egg-info")
    for name in ("causal-conv1d", "compat", "csrc", "mamba_ssm", "scripts"):
        shutil.copytree(root / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(root / name, source)
    switches = {"MAMBA_RELEASE": "1", "MAMBA_SSM_CUDA": "off", "CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0"}
    kept = "CMAKE_CXX_COMPILER_LAUNCHER"  # .ci/run has a cache
    clean = {
        name: value
        for name, value in os.environ.items()
        if name == kept or not name.startswith(("MAMBA", "MM_", "CMAKE"))
    }
    command = [sys.executable, "setup.py", "bdist_wheel"]
    done = subprocess.run(
        command, cwd=source, env=clean | switches, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="session")
def libraries(real_wheel, tmp_path_factory):
    from _helpers.wheel_forge import Libraries

    return Libraries(real_wheel, tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="session")
def cuda_wheel(real_wheel, libraries, tmp_path_factory):
    """With a stand-in for libmamba_cuda.so that holds the device code of two source files."""
    from _helpers.wheel_forge import CUDA, fat_binary

    code = libraries.make(section=fat_binary(*TARGETS) + bytes(8) + fat_binary(*TARGETS))
    return with_cuda(real_wheel, tmp_path_factory.mktemp("cuda"), {CUDA: code}, "manylinux_2_28_x86_64")


@pytest.fixture(scope="session")
def windows_wheel(real_wheel, libraries, tmp_path_factory):
    """With stand-ins for both DLLs."""
    from _helpers.wheel_forge import CPU, CPU_DLL, CUDA_DLL, fat_binary

    files = {
        CPU: None,
        CPU_DLL: libraries.make(windows=True),
        CUDA_DLL: libraries.make(windows=True, section=fat_binary(*TARGETS)),
    }
    return with_cuda(real_wheel, tmp_path_factory.mktemp("windows"), files, "win_amd64")


def with_cuda(wheel, folder, files, platform):
    from _helpers.wheel_forge import BUILD_INFO, forge, info

    version = wheel.name.split("-")[1]
    labelled = version.replace("+cpu", "+cu130")
    facts = {"local_label": "cu130", "cuda": True, "nvcc_version": "13.0.88", "architectures": TARGETS}
    facts["flags"] = {"cxx": "-O3 -DNDEBUG", "cuda": "-O3 -DNDEBUG"}
    if platform == "win_amd64":
        facts |= {"glibc": None, "linker": None, "host_compiler": "MSVC 19.44.35211.0"}
    return forge(
        wheel,
        folder,
        {
            **files,
            BUILD_INFO: info(**facts),
            "METADATA": lambda old: old.replace(f"Version: {version}".encode(), f"Version: {labelled}".encode()),
            "WHEEL": lambda old: old.replace(b"manylinux_2_28_x86_64", platform.encode()),
        },
        name=f"mamba_ssm-{labelled}-py3-none-{platform}.whl",
    )


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A repository with this source tree in its one commit."""
    from _helpers.checkouts import commit_of_this_tree

    return commit_of_this_tree(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def forged(real_wheel, checkout, tmp_path, monkeypatch):
    """forged(files, wheel, strict, allow_commits, **facts) -> (problems, notes) of verify_to_publish, for the wheel of
    the checkout's commit with these files, facts in build_info.json, RECORD made anew. The note on machine code, which
    each fit wheel has, is left out.
    """
    from _helpers.checkouts import git
    from _helpers.wheel_forge import BUILD_INFO, forge, info
    from wheel_check import MACHINE_CODE, verify_to_publish

    monkeypatch.setattr("wheel_check.source.ROOT", checkout)
    source = {"source_commit": git(checkout, "rev-parse", "HEAD"), "source_dirty": False}

    def call(files=None, wheel=real_wheel, strict=False, allow_commits=None, **facts):
        told, edit = info(**{**source, **facts}), (files or {}).get(BUILD_INFO, lambda old: old)
        made = forge(wheel, tmp_path, {**(files or {}), BUILD_INFO: lambda old: edit(told(old))})
        verdict = verify_to_publish(made, strict=strict, allow_commits=allow_commits)
        assert verdict.problems or verdict.notes[-1] == MACHINE_CODE
        return verdict.problems, [note for note in verdict.notes if note != MACHINE_CODE]

    return call
