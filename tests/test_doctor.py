"""python -m mamba_ssm: report, verdict and exit code, on this machine and on broken ones."""

import json
import sys
from pathlib import Path

import pytest
import torch

from mamba_ssm import __main__, __version__
from mamba_ssm._doctor import files, neighbours, self_test
from mamba_ssm._doctor.report import examine
from mamba_ssm._native import abi, loader
from mamba_ssm._torch import plans


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Without the folder of the source tree's causal_conv1d, which pytest puts on the path."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if Path(folder).name != "src"])


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
        "mamba2_scan",
        "mamba3_scan",
        "layer_norm",
        "rms_norm",
        "gated_rms_norm",
        "causal_conv1d",
        "causal_conv1d_update",
        "selective_state_update",
    }
    assert all(result["ok"] and 0 < result["relative_error"] < 1e-5 for result in report["self_test"]["cpu"].values())


@pytest.mark.gpu
def test_gpu_is_tested(cuda):
    report = examine()
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


@pytest.mark.parametrize(
    "kernel,tests",
    [
        ("selective_scan_forward", ["selective_scan"]),
        ("selective_scan_backward", ["selective_scan"]),
        ("ssd_forward", ["mamba2_scan"]),
        ("ssd_backward", ["mamba2_scan"]),
        ("mamba3_forward", ["mamba3_scan"]),
        ("mamba3_backward", ["mamba3_scan"]),
        ("norm_forward", ["layer_norm", "rms_norm", "gated_rms_norm"]),
        ("norm_backward", ["layer_norm", "rms_norm", "gated_rms_norm"]),
        ("causal_conv1d_forward", ["causal_conv1d"]),
        ("causal_conv1d_backward", ["causal_conv1d"]),
        ("causal_conv1d_update", ["causal_conv1d_update"]),
        ("selective_state_update", ["selective_state_update"]),
    ],
)
def test_each_kernel_is_run(capsys, monkeypatch, kernel, tests):
    monkeypatch.setitem(loader.load("cpu"), kernel, lambda *arguments: abi.ERROR_CUDA)
    plans.forget()  # plans hold the functions that they were made with
    code, out = run(capsys)
    plans.forget()
    assert code == 1
    assert f"self-test   cpu: {9 - len(tests)} of 9 operators are right; FAILED: {', '.join(tests)}\n" in out


def test_wrong_numbers_are_found(capsys, monkeypatch):
    monkeypatch.setitem(self_test.TESTS, "selective_scan", lambda device: float("nan"))
    code, out = run(capsys)
    assert code == 1
    assert "problem     self-test of selective_scan on cpu is wrong" in out


def test_a_wrong_gradient_is_found(monkeypatch):
    right = self_test.TESTS["mamba2_scan"]
    gradients = self_test._with_gradients

    def wrong(function, tensors):
        out, *grads = gradients(function, tensors)
        return [out, *grads] if out.dtype == torch.float64 else [out, *grads[:-1], 1.01 * grads[-1]]

    assert right("cpu") < 1e-5
    monkeypatch.setattr(self_test, "_with_gradients", wrong)
    assert right("cpu") > self_test._TOLERANCE


def test_failing_kernels_are_reported(capsys, monkeypatch):
    def fail(device):
        raise RuntimeError("the kernel\nsaid " + "no " * 1000 + "yes")

    monkeypatch.setitem(self_test.TESTS, "causal_conv1d", fail)
    code, out = run(capsys, "--json")
    error = json.loads(out)["self_test"]["cpu"]["causal_conv1d"]["error"]
    assert code == 1 and error.startswith("RuntimeError: the kernel\nsaid no no") and len(error) > 3000
    code, out = run(capsys)
    (line,) = (line for line in out.splitlines() if line.startswith("problem"))
    assert code == 1 and line.startswith("problem     self-test of causal_conv1d on cpu failed: the kernel said no no")
    assert len(line) < 500 and " ... " in line and line.endswith("no yes")


def test_the_parts_are_in_the_report(capsys, monkeypatch):
    def files_found(problems, notes):
        problems.append("of the files")
        notes.append("a note")
        return {"is": "what it is", "missing": [], "changed": []}

    def neighbours_found(problems, notes):
        problems.append("of the neighbours")
        return {"causal_conv1d": "whose"}

    monkeypatch.setattr(files, "examine", files_found)
    monkeypatch.setattr(neighbours, "examine", neighbours_found)
    code, out = run(capsys)
    assert code == 1
    assert "files       what it is\nbeside      causal_conv1d: whose\n" in out
    assert "note        a note\n" in out  # beside it one of a torch that is built with CUDA
    assert "problem     of the files\nproblem     of the neighbours\nverdict     NOT healthy" in out


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A CUDA build of torch that sees one GPU."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Pretend GPU")


def test_cpu_only_wheel_on_a_gpu_machine(capsys, tmp_path, monkeypatch, pretend_gpu):
    (tmp_path / "build_info.json").write_text(json.dumps({"cuda": False}))
    (tmp_path / loader.library_path("cpu").name).symlink_to(loader.library_path("cpu"))
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "_build_info", None)
    code, out = run(capsys)
    assert code == 1
    assert "works on cpu; 1 problem: torch sees 1 GPU(s), but this is a CPU-only mamba_ssm" in out


def test_gpu_that_torch_cannot_use(capsys, monkeypatch, pretend_gpu):
    def fail(index):
        raise RuntimeError("CUDA error:\nout of memory")

    facts = loader.info("cpu")
    monkeypatch.setattr(loader, "info", lambda kind: facts)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    code, out = run(capsys)
    assert code == 1
    assert "problem     cuda:0 cannot be used: RuntimeError: CUDA error: out of memory\n" in out


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
    report = examine()
    assert not report["healthy"]
    assert "supports CUDA 12.4" in report["problems"][0] and "580" in report["problems"][0]
    facts.cuda_driver_version = 13000
    report = examine()
    assert "sm_90" in report["problems"][0] and "75-real" in report["problems"][0]


def test_build_info_that_promises_cuda(tmp_path, monkeypatch):
    (tmp_path / loader.library_path("cpu").name).symlink_to(loader.library_path("cpu"))
    (tmp_path / "build_info.json").write_text(json.dumps({"cuda": True}))
    monkeypatch.setattr(loader, "LIBRARY_FOLDER", tmp_path)
    monkeypatch.setattr(loader, "_build_info", None)
    assert any("the library is missing" in problem for problem in examine()["problems"])
