"""What all tests share: the device parameter. GPU tests skip, and say so, where there is no GPU."""

import shutil

import pytest
import torch


def _gpu_missing():
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "no NVIDIA GPU is visible"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every operator test runs on each device."""
    if request.param == "cuda":
        missing = _gpu_missing()
        if missing:
            pytest.skip(missing)
    return request.param


@pytest.fixture
def cuda():
    """For tests that make sense on a GPU only; mark them gpu as well."""
    missing = _gpu_missing()
    if missing:
        pytest.skip(missing)
    return "cuda"


@pytest.fixture
def needs_inductor():
    """torch's own code generator builds C++ for the CPU, and C around triton's kernels."""
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "cl")):
        pytest.skip("torch.compile's inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh():
    """One thread: the problems are small, and torch's own threads wait for each other on a busy machine.

    tests/test_processes.py is about more of them.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if hasattr(torch, "_dynamo"):
        torch._dynamo.reset()
