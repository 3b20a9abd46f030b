"""What the tests of the wheel builder share: a made-up machine. They need no torch, no compiler and no CUDA:
`pytest --confcutdir=tests/build tests/build -m "not slow"` runs them in an environment that holds pytest alone.
"""

import dataclasses
from pathlib import Path

import pytest
from wheel_build import cuda, facts

GIB = 1 << 30
CUDA_13_0 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
NVCC = cuda.Nvcc("/usr/local/cuda/bin/nvcc", "folder")


@pytest.fixture
def root() -> Path:
    """The source tree."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture
def machine():
    """Facts of a healthy Linux machine with CUDA 13.0; keywords change single facts."""
    healthy = facts.Facts(
        platform="linux",
        machine="x86_64",
        cores=8,
        memory=64 * GIB,
        disk=100 * GIB,
        writable=True,
        root="/src/mamba",
        compiler=facts.Tool("/usr/bin/c++", "12.2.0"),
        cmake=facts.Tool("/venv/bin/cmake", "4.0.3"),
        ninja=facts.Tool("/venv/bin/ninja", "1.13.0"),
        discovery=cuda.Discovery(NVCC),
        nvcc_version=(13, 0),
        nvcc_full_version="13.0.88",
        nvcc_architectures=CUDA_13_0,
        python="3.12.1",
    )
    return lambda **changes: dataclasses.replace(healthy, **changes)


@pytest.fixture
def without_nvcc():
    """The facts that change where there is no CUDA toolkit."""
    return {
        "discovery": cuda.Discovery(None),
        "nvcc_version": None,
        "nvcc_full_version": "",
        "nvcc_architectures": (),
    }


@pytest.fixture
def made_up():
    """made_up(platform, files) -> a file system that holds just these: a list of paths, or {path: text}."""

    def make(platform, files):
        present = files if isinstance(files, dict) else dict.fromkeys(files, "")
        separator = "\\" if platform == "win32" else "/"

        def list_folder(folder):
            prefix = folder + separator
            return sorted({path[len(prefix) :].split(separator)[0] for path in present if path.startswith(prefix)})

        def read(path):
            return present.get(path, "")

        return cuda.FileSystem(lambda path: path in present, list_folder, read)

    return make
