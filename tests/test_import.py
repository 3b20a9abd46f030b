"""Importing: quick, loads no library, needs neither triton nor a GPU; upstream's paths exist."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from _helpers.names import PATHS
from _helpers.programs import run_code

import mamba_ssm

LIMIT = 0.5  # seconds of the processor; an import takes about 40 ms, and three times that to compile it first


def python(code, run=run_code):
    """Runs code in a new process that finds the same mamba_ssm; returns what it printed as JSON."""
    root = json.dumps(str(Path(mamba_ssm.__file__).parent.parent))
    done = run(f"import sys; sys.path.append({root})\n{code}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_new_python(code):
    """Which has not imported torch."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_submodules_are_attributes_of_a_plain_import():
    """Code that imports mamba_ssm alone goes on by attributes: transformers looks up mamba_ssm.ops.triton.* so."""
    code = """
import json
import mamba_ssm
from functools import reduce
paths = %r
for path in paths:
    assert reduce(getattr, path.split(".")[1:], mamba_ssm) is sys.modules[path], path
for package in (mamba_ssm.ops, mamba_ssm.ops.triton, mamba_ssm.utils, mamba_ssm.modules):
    assert not hasattr(package, "no_such_module") and not hasattr(package, "__no_such__")
print(json.dumps(None))
"""
    python(code % list(PATHS))


def test_importing_again_when_the_modules_were_deleted():
    """As notebooks and test runners do. Functions that others hold of the first import go on."""
    code = """
import json, torch, mamba_ssm
def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
def scan(function, compiled=False):
    torch.manual_seed(0)
    u, A, B = torch.randn(1, 4, 9, requires_grad=True), -torch.rand(4, 2), torch.randn(1, 2, 9)
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    out = run(u, u, A, B, B)
    out.sum().backward()
    return torch.stack([out.detach(), u.grad])
first = mamba_ssm
expected = scan(first.selective_scan_fn)
for _ in range(2):
    forget()
    import mamba_ssm
    assert mamba_ssm is not first
    for package in (first, mamba_ssm):
        assert torch.equal(scan(package.selective_scan_fn), expected)
        assert torch.equal(scan(package.selective_scan_fn, compiled=True), expected)
    mamba_ssm.Mamba(16)(torch.randn(1, 3, 16)).sum().backward()
forget()
torch.ops.mamba_ssm.schemas["swiglu"] = "swiglu(Tensor xy, bool more) -> Tensor"
try:
    import mamba_ssm
except ImportError as error:
    print(json.dumps(str(error)))
"""
    assert "another version of mamba_ssm was imported before in this process, whose operator swiglu" in python(code)


def test_version_is_newer_than_upstreams():
    assert tuple(int(part) for part in mamba_ssm.__version__.split("+")[0].split(".")) >= (2, 4, 0)


def test_import_is_light():
    code = """
import json, time
import torch
start = time.process_time()
before = set(sys.modules)
import mamba_ssm
seconds = time.process_time() - start
from mamba_ssm._native import loader
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"seconds": seconds, "new": sorted(new), "loaded": loader.loaded("cpu") or loader.loaded("cuda")}))
"""
    for _ in range(3):  # on a busy machine the first may be slow
        report = python(code, in_new_python)
        if report["seconds"] < LIMIT:
            break
    assert not report["loaded"], "a kernel library was loaded by the import"
    assert report["seconds"] < LIMIT, report
    for heavy in (
        "triton",
        "transformers",
        "einops",
        "numpy",
        "causal_conv1d",
        "packaging",
        "safetensors",
        "huggingface_hub",
    ):
        assert heavy not in report["new"]


def test_without_torch_the_error_names_this_python_and_the_cure(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", "import mamba_ssm.ops.causal_conv1d"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 1
    needs = f"mamba_ssm needs torch 2.2 or newer, which {sys.executable} does not have; do: pip install torch"
    assert done.stderr.splitlines()[-1].endswith(needs)


def test_works_with_default_dtype_and_device_changed():
    try:
        torch.set_default_dtype(torch.float64)
        u = torch.randn(1, 4, 8, dtype=torch.float32)
        A, B = -torch.rand(4, 2, dtype=torch.float32), torch.randn(1, 2, 8, dtype=torch.float32)
        assert mamba_ssm.selective_scan_fn(u, u, A, B, B).dtype == torch.float32
        module = mamba_ssm.Mamba(16, dtype=torch.float32)
        assert module.D.dtype == module.A_log.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
