"""Importing: quick, loads no library, needs neither triton nor a GPU; upstream's paths exist."""

import importlib
import inspect
import json
import os
import subprocess
import sys

import pytest
import torch

import mamba_ssm

PATHS = {
    "mamba_ssm": [
        "selective_scan_fn",
        "mamba_inner_fn",
        "Mamba",
        "Mamba2",
        "Mamba3",
        "MambaLMHeadModel",
        "__version__",
    ],
    "mamba_ssm.ops.selective_scan_interface": [
        "selective_scan_fn",
        "selective_scan_ref",
        "mamba_inner_fn",
        "mamba_inner_ref",
    ],
    "mamba_ssm.ops.causal_conv1d": [
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "causal_conv1d_varlen_states",
        "causal_conv1d_ref",
    ],
    "mamba_ssm.ops.triton.ssd_chunk_state": [
        "_chunk_cumsum_fwd",
        "_chunk_state_fwd",
        "chunk_state",
        "chunk_state_ref",
        "chunk_state_varlen",
    ],
    "mamba_ssm.ops.triton.ssd_chunk_scan": ["chunk_scan", "chunk_scan_ref"],
    "mamba_ssm.ops.triton.ssd_state_passing": ["_state_passing_fwd", "state_passing", "state_passing_ref"],
    "mamba_ssm.ops.triton.selective_state_update": ["selective_state_update", "selective_state_update_ref"],
    "mamba_ssm.ops.triton.layer_norm": [
        "layer_norm_fn",
        "rms_norm_fn",
        "RMSNorm",
        "layer_norm_ref",
        "rms_norm_ref",
        "layer_norm_linear_fn",
    ],
    "mamba_ssm.ops.triton.layernorm_gated": ["layernorm_fn", "rmsnorm_fn", "LayerNorm", "RMSNorm", "rms_norm_ref"],
    "mamba_ssm.ops.triton.k_activations": ["_swiglu_fwd", "_swiglu_bwd", "swiglu"],
    "mamba_ssm.ops.triton.softplus": ["softplus"],
    "mamba_ssm.ops.streaming": ["SelectiveScan"],
    "mamba_ssm.ops.triton.ssd_combined": [
        "mamba_chunk_scan",
        "mamba_chunk_scan_combined",
        "ssd_chunk_scan_combined_ref",
        "ssd_selective_scan",
        "mamba_split_conv1d_scan_combined",
        "mamba_split_conv1d_scan_ref",
        "mamba_conv1d_scan_ref",
    ],
    "mamba_ssm.modules.mamba_simple": ["Mamba"],
    "mamba_ssm.modules.mamba2": ["Mamba2"],
    "mamba_ssm.modules.mamba2_simple": ["Mamba2Simple"],
    "mamba_ssm.modules.mamba3": ["Mamba3", "heavy_tail_activation"],
    "mamba_ssm.modules.ssd_minimal": ["segsum", "ssd_minimal_discrete"],
    "mamba_ssm.modules.block": ["Block"],
    "mamba_ssm.modules.mha": ["MHA"],
    "mamba_ssm.modules.mlp": ["GatedMLP"],
    "mamba_ssm.models.config_mamba": ["MambaConfig"],
    "mamba_ssm.models.mixer_seq_simple": ["create_block", "MixerModel", "MambaLMHeadModel"],
    "mamba_ssm.utils.generation": ["InferenceParams", "GenerationMixin", "decode", "sample", "update_graph_cache"],
    "mamba_ssm.utils.hf": ["load_config_hf", "load_state_dict_hf"],
    "mamba_ssm.distributed.tensor_parallel": [
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "ColumnParallelEmbedding",
        "ParallelEmbeddings",
    ],
    "mamba_ssm.distributed.distributed_utils": [
        "all_gather",
        "all_gather_raw",
        "reduce_scatter",
        "reduce_scatter_raw",
        "all_reduce",
        "all_reduce_raw",
        "sync_shared_params",
        "allreduce_sequence_parallel_grad",
        "get_dim_for_local_rank",
    ],
}


def python(code):
    """Runs code in a new Python that finds the same mamba_ssm; returns what it printed as JSON."""
    root = json.dumps(str(__import__("pathlib").Path(mamba_ssm.__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({root})\n{code}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("path", PATHS)
def test_upstreams_paths(path):
    module = importlib.import_module(path)
    for name in PATHS[path]:
        assert hasattr(module, name), f"{path}.{name}"


def public_functions(thing):
    """A function itself; of a class its constructor and public methods, those of its bases in this package too."""
    if not inspect.isclass(thing):
        return [thing] if callable(thing) else []
    owners = [owner for owner in thing.__mro__ if owner.__module__.startswith("mamba_ssm")]
    names = {name for owner in owners for name in vars(owner) if name == "__init__" or not name.startswith("_")}
    return [member for member in (getattr(thing, name) for name in sorted(names)) if inspect.isroutine(member)]


@pytest.mark.parametrize("path", PATHS)
def test_hints_are_complete(path):
    """py.typed promises them; whether they are true is for mypy to say."""
    module = importlib.import_module(path)
    without = []
    for function in (function for name in PATHS[path] for function in public_functions(getattr(module, name))):
        signature = inspect.signature(function)
        unknown = [part.name for part in signature.parameters.values() if part.annotation is part.empty]
        unknown += ["the result"] if signature.return_annotation is signature.empty else []
        without += [f"{function.__qualname__}: {name}" for name in unknown if name not in ("self", "cls")]
    assert without == []


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
start = time.perf_counter()
before = set(sys.modules)
import mamba_ssm
seconds = time.perf_counter() - start
from mamba_ssm._native import loader
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"seconds": seconds, "new": sorted(new), "loaded": loader.loaded("cpu") or loader.loaded("cuda")}))
"""
    report = min((python(code) for _ in range(3)), key=lambda report: report["seconds"])
    assert not report["loaded"], "a kernel library was loaded by the import"
    assert report["seconds"] < 0.5, report  # about 20 ms on an idle machine
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


@pytest.mark.parametrize("words", [["-m", "mamba_ssm"], ["-c", "import mamba_ssm.ops.causal_conv1d"]])
def test_without_torch_the_error_names_this_python_and_the_cure(tmp_path, words):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True)
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
