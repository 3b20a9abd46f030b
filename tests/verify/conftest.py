"""What the tests of the verifier share: one real wheel, and wheels with CUDA and for Windows made out of it."""

import importlib.util
import json
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
    source = tmp_path_factory.mktemp("build") / "source"
    ignored = shutil.ignore_patterns("lib", "__pycache__", "*.egg-info")
    for name in ("causal-conv1d", "compat", "csrc", "mamba_ssm", "scripts"):
        shutil.copytree(request.config.rootpath / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(request.config.rootpath / name, source)
    switches = {"MAMBA_RELEASE": "1", "MAMBA_SSM_CUDA": "off", "CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAMBA", "MM_", "CMAKE"))}
    command = [sys.executable, "setup.py", "bdist_wheel"]
    done = subprocess.run(
        command, cwd=source, env=clean | switches, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (found,) = (source / "dist").glob("mamba_ssm-*.whl")
    return found


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
    from _helpers.wheel_forge import BUILD_INFO, forge

    version = wheel.name.split("-")[1]
    labelled = version.replace("+cpu", "+cu130")
    facts = {"local_label": "cu130", "cuda": True, "nvcc_version": "13.0.88", "architectures": TARGETS}
    return forge(
        wheel,
        folder,
        {
            **files,
            BUILD_INFO: lambda old: json.dumps({**json.loads(old), **facts}).encode(),
            "METADATA": lambda old: old.replace(f"Version: {version}".encode(), f"Version: {labelled}".encode()),
            "WHEEL": lambda old: old.replace(b"manylinux_2_28_x86_64", platform.encode()),
        },
        name=f"mamba_ssm-{labelled}-py3-none-{platform}.whl",
    )
