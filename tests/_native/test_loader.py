"""Loading the libraries: every way to fail says what was tried and what to do; error codes become exceptions."""

import ctypes
import hashlib
import json
import threading

import pytest

from mamba_ssm._native import abi, loader
from mamba_ssm._native.errors import (
    NativeError,
    architecture_problem,
    driver_problem,
    exception_for,
    shell_command,
)

REAL = loader.library_path("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty lib folder and a loader that has loaded nothing yet."""
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "libraries", {})
    monkeypatch.setattr(loader, "_build_info", None)
    return tmp_path


def test_no_library_at_all(folder):
    with pytest.raises(NativeError, match=r"does not exist, nor does any other kernel library.*bdist_wheel"):
        loader.load("cpu")


def test_cuda_tensor_in_an_editable_install_for_the_cpu(folder):
    """The error says what pip hid when it was built."""
    loader.library_path("cpu").touch()
    chosen = "for the CPU alone: the build saw no GPU (TORCH_CUDA_ARCH_LIST=9.0 ...)"
    (folder / "build_info.json").write_text(json.dumps({"local_label": "cpu", "cuda": False, "editable": chosen}))
    with pytest.raises(NativeError, match=r"CPU kernels only .* editable .* for the CPU alone.*9\.0") as error:
        loader.load("cuda")
    assert "`pip install --no-build-isolation -e .` compiles for that GPU" in str(error.value)


def test_cuda_tensor_in_a_cpu_only_wheel(folder):
    loader.library_path("cpu").touch()
    (folder / "build_info.json").write_text(json.dumps({"local_label": "cpu", "cuda": False}))
    with pytest.raises(NativeError, match=r"CUDA tensor, but .* CPU kernels only \(label \+cpu\).*MAMBA_SSM_CUDA=on"):
        loader.load("cuda")


def test_hints_on_windows_are_for_powershell(folder, monkeypatch):
    path = folder / "mamba_cuda.dll"
    monkeypatch.setattr("sys.platform", "win32")
    (folder / "mamba_cpu.dll").touch()
    assert '`$env:MAMBA_SSM_CUDA = "on"; python setup.py bdist_wheel`' in loader.missing_message("cuda", path)
    assert '`$env:TORCH_CUDA_ARCH_LIST = "12.0"; pip wheel' in architecture_problem((12, 0), ["86-real"])


def test_damaged_library(folder):
    path = loader.library_path("cpu")
    path.write_bytes(b"not a library")
    with pytest.raises(NativeError, match=r"could not load it.*Reinstall") as failure:
        loader.load("cpu")
    assert str(path) in str(failure.value)
    assert isinstance(failure.value.__cause__, OSError)


def record(folder, **changes):
    """A build_info.json that tells of the CPU library in `folder`."""
    path = loader.library_path("cpu")
    entry = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **changes}
    (folder / "build_info.json").write_text(json.dumps({"libraries": {path.name: entry}}))


def test_file_of_another_size_is_not_opened(folder, monkeypatch):
    """Python would end with SIGBUS where the system looks for the pages that were cut off."""
    opened = []
    monkeypatch.setattr(ctypes, "CDLL", opened.append)
    path = loader.library_path("cpu")
    path.write_bytes(b"cut")
    record(folder, size=5000)
    words = rf"{path} is damaged or was changed: it has 3 bytes, and 5000 are recorded.*pip install --force-reinstall"
    with pytest.raises(NativeError, match=words):
        loader.load("cpu")
    assert opened == []


def test_file_with_one_other_byte_is_not_opened(folder, monkeypatch):
    """It would run, and compute what it likes."""
    data = bytearray(REAL.read_bytes())
    path = loader.library_path("cpu")
    path.write_bytes(data)
    record(folder)
    assert "selective_scan_forward" in loader.load("cpu")
    data[len(data) // 2] ^= 1
    path.unlink()  # the file of before is in use
    path.write_bytes(data)
    monkeypatch.setattr(loader, "libraries", {})
    words = rf"{path} is damaged or was changed: its SHA-256 is {hashlib.sha256(data).hexdigest()}, and .*"
    with pytest.raises(NativeError, match=words + "pip install --force-reinstall --no-deps with the wheel's file"):
        loader.load("cpu")


def test_file_that_cannot_be_read(folder, monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    path = loader.library_path("cpu")
    path.write_bytes(b"library")
    record(folder)
    monkeypatch.setattr(loader, "_sha256", deny)
    with pytest.raises(NativeError, match=rf"{path} cannot be read: .*Permission denied.*Reinstall"):
        loader.load("cpu")


def test_failure_is_not_remembered(folder):
    with pytest.raises(NativeError):
        loader.load("cpu")
    loader.library_path("cpu").symlink_to(REAL)
    assert "selective_scan_forward" in loader.load("cpu")


def test_library_of_another_version(monkeypatch):
    functions = dict(loader.load("cpu"))
    monkeypatch.setattr(abi, "ABI_VERSION", abi.ABI_VERSION + 1)
    with pytest.raises(NativeError, match="does not match this package: its ABI version is"):
        loader._check_layout(functions, "library")
    functions["struct_size"] = lambda name: 1
    with pytest.raises(NativeError, match=r"MambaRun has 1 bytes there and 16 here.*reinstall"):
        loader._check_layout(functions, "library")


def test_library_without_our_functions(folder, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    loader.library_path("cpu").touch()
    with pytest.raises(NativeError, match="it lacks a function"):
        loader.load("cpu")


@pytest.mark.parametrize(
    "text,reason",
    [
        ("{", "Expecting"),
        ("[]", r"it holds \[\], which is no JSON object"),
        ("null", "it holds null, which is no JSON object"),
        ('{"architectures": 90}', "architectures is 90, which is no list"),
        ('{"libraries": []}', r"libraries is \[\], which tells no size"),
        ('{"libraries": {"libmamba_cpu.so": 5}}', "which tells no size and sha256"),
    ],
)
def test_unreadable_build_info(folder, text, reason):
    (folder / "build_info.json").write_text(text)
    with pytest.raises(NativeError, match=rf"build_info\.json cannot be read: .*{reason}.*Reinstall"):
        loader.build_info()


@pytest.mark.parametrize(
    "platform,text", [("linux", "LIST='8.6;9.0' build ."), ("win32", '$env:LIST = "8.6;9.0"; build .')]
)
def test_commands_are_quoted_for_the_users_shell(monkeypatch, platform, text):
    monkeypatch.setattr("sys.platform", platform)
    assert shell_command("build .", LIST="8.6;9.0") == text


def test_threads_load_once(folder, monkeypatch):
    opened = []

    def slow_open(kind):
        opened.append(kind)
        return {"kind": kind}

    monkeypatch.setattr(loader, "_open", slow_open)
    threads = [threading.Thread(target=loader.load, args=("cpu",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == ["cpu"]


@pytest.mark.parametrize(
    "driver,runtime,words",
    [
        (0, 13000, ["no NVIDIA driver", "CUDA 13.0", "580"]),
        (12040, 13000, ["supports CUDA 12.4", "CUDA 13.0", "580", "+cu12x"]),
        (11080, 12090, ["supports CUDA 11.8", "CUDA 12.9", "525"]),
        (13000, 13020, None),
        (13000, 12090, None),
        (12020, 12090, None),
    ],
)
def test_driver(driver, runtime, words):
    problem = driver_problem(driver, runtime)
    if words is None:
        assert problem is None
    else:
        assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    "capability,architectures,runs",
    [
        ((7, 5), ["75-real"], True),
        ((8, 9), ["80-real", "86-real"], True),
        ((8, 0), ["86-real"], False),
        ((9, 0), ["80-real", "86-real"], False),
        ((9, 0), ["80-virtual"], True),
        ((9, 0), ["90a-real"], True),
        ((10, 0), ["90a-real", "90a-virtual"], False),
        ((12, 0), ["75-real", "120-real", "120-virtual"], True),
        ((12, 1), ["120-real"], True),
        ((12, 1), ["120a-real"], False),
        ((10, 3), ["100f-real"], True),
        ((12, 0), ["100f-real"], False),
        ((7, 0), ["75-real", "75-virtual"], False),
        ((8, 6), ["86"], True),
        ((9, 0), ["86"], True),
        ((9, 0), ["native"], True),
        ((9, 0), [], False),
    ],
)
def test_architecture(capability, architectures, runs):
    problem = architecture_problem(capability, architectures)
    assert (problem is None) == runs
    if problem:
        assert f"sm_{capability[0]}{capability[1]}" in problem
        assert "TORCH_CUDA_ARCH_LIST" in problem


def test_wrong_gpu_is_refused_before_any_kernel(monkeypatch):
    facts = abi.MambaLibraryInfo(cuda_runtime_version=13000, cuda_driver_version=13000)
    monkeypatch.setattr(loader, "load", lambda kind: {})
    monkeypatch.setattr(loader, "info", lambda kind: facts)
    monkeypatch.setattr(loader, "build_info", lambda: {"architectures": ["75-real"]})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    with pytest.raises(
        NativeError, match=r"cannot run on cuda:3: the GPU's architecture is sm_90.*holds code for 75-real"
    ):
        loader.cuda_functions(3)


@pytest.mark.parametrize(
    "code,kind,words",
    [
        (abi.ERROR_INVALID, ValueError, "some words"),
        (abi.ERROR_UNSUPPORTED, NotImplementedError, "some words"),
        (abi.ERROR_DTYPE_DISABLED, NativeError, "some words"),
        (abi.ERROR_CUDA, NativeError, "some words"),
        (abi.ERROR_NO_KERNEL_IMAGE, NativeError, "TORCH_CUDA_ARCH_LIST"),
        (abi.ERROR_DRIVER, NativeError, "python -m mamba_ssm"),
        (abi.ERROR_MEMORY, MemoryError, "some words"),
        (abi.ERROR_INDEX, IndexError, "some words"),
        (99, NativeError, "error code 99"),
    ],
)
def test_error_codes(code, kind, words):
    error = exception_for(code, "some words", "selective_scan_forward")
    assert isinstance(error, kind)
    assert words in str(error)
    assert str(error).startswith("selective_scan_forward: some words")
