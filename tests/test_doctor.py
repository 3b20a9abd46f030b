"""python -m mamba_ssm: report, verdict and exit code, on this machine and on broken ones."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mamba_ssm import __main__, __version__, _doctor
from mamba_ssm._native import abi, loader


def run(capsys, *arguments):
    code = __main__.main(list(arguments))
    return code, capsys.readouterr().out


def test_text_ends_with_the_verdict(capsys):
    code, out = run(capsys)
    assert code == 0, out
    assert __version__ in out and torch.__version__ in out
    assert out.strip().splitlines()[-1].startswith("verdict     healthy: mamba_ssm works on cpu")


def test_json(capsys):
    code, out = run(capsys, "--json")
    report = json.loads(out)
    assert code == 0 and report["healthy"]
    assert report["libraries"]["cpu"]["loaded"]
    assert set(report["self_test"]["cpu"]) == {
        "selective_scan",
        "causal_conv1d",
        "causal_conv1d_update",
        "selective_state_update",
    }


@pytest.mark.gpu
def test_gpu_is_tested(cuda):
    report = _doctor.examine()
    assert report["healthy"], report["problems"]
    assert report["gpus"][0]["architecture"].startswith("sm_")
    assert all(result["ok"] for result in report["self_test"]["cuda:0"].values())
    assert report["driver"]["supports_cuda"]


def test_a_cross_built_wheel_says_so(capsys, monkeypatch):
    assert "cross-built" not in run(capsys)[1]
    monkeypatch.setattr(loader, "_build_info", {**loader.build_info(), "cross_built": {"on": "Linux"}})
    code, out = run(capsys)
    assert code == 0
    assert "note        this wheel was cross-built on Linux and has not been run on Windows" in out


def test_missing_libraries(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "libraries", {})
    monkeypatch.setattr(loader, "_build_info", None)
    code, out = run(capsys)
    assert code == 1
    assert "NOT healthy" in out and "bdist_wheel" in out


@pytest.fixture
def damaged(tmp_path):
    """A copy of the installed package whose CPU library can be damaged: its lib folder, the library, its bytes."""
    package = Path(_doctor.__file__).parent
    shutil.copytree(
        package, tmp_path / "mamba_ssm", ignore=shutil.ignore_patterns("*cuda.so", "*cuda.dll", "__pycache__")
    )
    lib = tmp_path / "mamba_ssm" / "lib"
    library = lib / loader.library_path("cpu").name
    data = library.read_bytes()
    recorded = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (lib / "build_info.json").write_text(json.dumps({"libraries": {library.name: recorded}}))
    return lib, library, data


def examine(lib):
    command = [sys.executable, "-m", "mamba_ssm"]
    environ = {**os.environ, "PYTHONPATH": str(lib.parents[1])}
    return subprocess.run(command, cwd=lib, env=environ, capture_output=True, text=True)


def test_library_that_was_cut_off(damaged):
    """Opened, it would end the doctor with SIGBUS."""
    lib, library, data = damaged
    size = len(data) // 2
    library.write_bytes(data[:size])
    done = examine(lib)
    assert done.returncode == 1, done.stderr
    assert (
        f"problem     mamba_ssm: {library} is damaged or was changed: it has {size} bytes, and {len(data)}"
        in done.stdout
    )


def test_library_with_other_bytes(damaged):
    lib, library, data = damaged
    library.write_bytes(data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2))
    done = examine(lib)
    assert done.returncode == 1, done.stderr
    assert f"problem     mamba_ssm: {library} is damaged or was changed: its SHA-256 is" in done.stdout


@pytest.mark.parametrize("text", ["[]", "{", '{"architectures": 5}'])
def test_damaged_build_info_is_one_problem(capsys, tmp_path, monkeypatch, text):
    (tmp_path / loader.library_path("cpu").name).symlink_to(loader.library_path("cpu"))
    (tmp_path / "build_info.json").write_text(text)
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "libraries", {})
    monkeypatch.setattr(loader, "_build_info", None)
    code, out = run(capsys)
    assert code == 1
    assert "build_info.json cannot be read" in out
    assert "how it was built is not known" in out


def test_wrong_numbers_are_found(capsys, monkeypatch):
    monkeypatch.setitem(_doctor._TESTS, "selective_scan", lambda device: float("nan"))
    code, out = run(capsys)
    assert code == 1
    assert "self-test of selective_scan on cpu is wrong" in out


def test_failing_kernels_are_reported(capsys, monkeypatch):
    def fail(device):
        raise RuntimeError("the kernel said no")

    monkeypatch.setitem(_doctor._TESTS, "causal_conv1d", fail)
    code, out = run(capsys, "--json")
    report = json.loads(out)
    assert code == 1
    assert report["self_test"]["cpu"]["causal_conv1d"] == {"ok": False, "error": "RuntimeError: the kernel said no"}


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A CUDA build of torch that sees one GPU."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Pretend GPU")


def test_cpu_only_wheel_on_a_gpu_machine(capsys, tmp_path, monkeypatch, pretend_gpu):
    (tmp_path / loader.library_path("cpu").name).symlink_to(loader.library_path("cpu"))
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "_build_info", None)
    code, out = run(capsys)
    assert code == 1
    assert "works on cpu; 1 problem: torch sees 1 GPU(s), but this is a CPU-only mamba_ssm" in out


def test_old_driver_and_wrong_architecture(tmp_path, monkeypatch, pretend_gpu):
    facts = abi.MambaLibraryInfo(abi_version=2, is_cuda=1, cuda_runtime_version=13000, cuda_driver_version=12040)
    real_info = loader.info
    for kind in ("cpu", "cuda"):
        (tmp_path / loader.library_path(kind).name).touch()
    (tmp_path / "build_info.json").write_text(json.dumps({"cuda": True, "architectures": ["75-real"]}))
    monkeypatch.setattr(loader, "info", lambda kind: facts if kind == "cuda" else real_info(kind))
    loader.load("cpu")
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "_build_info", None)
    report = _doctor.examine()
    assert not report["healthy"]
    assert "supports CUDA 12.4" in report["problems"][0] and "580" in report["problems"][0]
    facts.cuda_driver_version = 13000
    report = _doctor.examine()
    assert "sm_90" in report["problems"][0] and "75-real" in report["problems"][0]


def test_build_info_that_promises_cuda(tmp_path, monkeypatch):
    (tmp_path / loader.library_path("cpu").name).symlink_to(loader.library_path("cpu"))
    (tmp_path / "build_info.json").write_text(json.dumps({"cuda": True}))
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "_build_info", None)
    assert any("the library is missing" in problem for problem in _doctor.examine()["problems"])
