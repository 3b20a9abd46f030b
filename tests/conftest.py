"""What all tests share: the device parameter, and processes. GPU tests skip, and say so, where there is no GPU.

With MAMBA_EMULATED_CUDA, the path of a libmamba_cuda.so that csrc/tests/emulator has made, the CUDA kernels run on the
CPU: a test's "cuda" case then gets CPU tensors, whose calls go to that library.
"""

import os
import shutil
import sys

import pytest
from _helpers import parallel

# Programs that tests start share the cores with the other processes of this run. Before torch, which reads it once.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", str(parallel.threads(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))

import torch

EMULATED_CUDA = os.environ.get("MAMBA_EMULATED_CUDA")
_PROCESSES = pytest.StashKey[str]()  # what the header says of them


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    config.stash[_PROCESSES] = parallel.set_up(config)


def pytest_report_header(config):
    return config.stash.get(_PROCESSES, "") or None


def pytest_sessionfinish():
    path = os.environ.get("MAMBA_KERNELS_REACHED")
    if path:
        from _helpers import reached

        reached.write(path)


def _gpu_missing():
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "no NVIDIA GPU is visible"


@pytest.fixture
def cuda():
    """For tests that make sense on a GPU only; mark them gpu as well."""
    missing = _gpu_missing()
    if missing:
        pytest.skip(missing)
    return "cuda"


@pytest.fixture
def cuda_kernels(request, monkeypatch):
    """For tests of the CUDA kernels: a GPU, or the CPU where the kernels are emulated; mark them gpu as well."""
    if EMULATED_CUDA is None:
        return request.getfixturevalue("cuda")
    from _helpers import cuda_library

    from mamba_ssm._native import loader
    from mamba_ssm._torch import plans

    given = getattr(request.node, "callspec", None)
    if given and torch.float16 in given.params.values() and not cuda_library.emulates_float16():
        pytest.skip("the sanitized emulator has no float16")
    monkeypatch.setitem(loader.libraries, "cpu", cuda_library.emulated_functions())
    monkeypatch.setitem(loader.libraries, "cuda", cuda_library.emulated_functions())  # for utils.kernels
    plans.forget()
    request.addfinalizer(plans.forget)
    return "cpu"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Every operator test runs on each device."""
    return request.param if request.param == "cpu" else request.getfixturevalue("cuda_kernels")


@pytest.fixture
def kernels(request):
    """Whose kernels a test with `device` runs, "cpu" or "cuda": emulated ones run on the CPU."""
    return request.node.callspec.params["device"]


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
    if "torch._dynamo" in sys.modules:  # a mere look at torch._dynamo imports it, which takes a second
        torch._dynamo.reset()
