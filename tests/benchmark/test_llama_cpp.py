"""The comparison with llama.cpp, on a model so small that it takes seconds. Runs where llama.cpp is installed."""

import pytest
import torch
from _helpers.small_benchmark import FOLDER, load


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = load("beside_llama_cpp")
    pytest.importorskip("mamba_ssm.gguf")
    if not module.installed():
        pytest.skip("llama.cpp is not installed (xllamacpp, gguf)")
    return module


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_both_compute_the_same_and_are_timed(layer, kind, beside):
    """That the logits agree, one_case checks before it returns."""
    row = beside.one_case(layer, kind, 1, n_layer=2, d_model=64, vocabulary=96, prompt=9, new=4, rounds=2)
    assert 0 < row["apart"] < (1e-4 if kind == "f32" else 0.1)
    assert all(value > 0 for value in row.values())
    explained = load("table").EXPLANATIONS
    assert all(column in explained for column in ("case", "threads", *row, "load"))


def test_logits_that_differ_are_an_error(beside):
    ours = torch.linspace(-1, 1, 5)
    with pytest.raises(RuntimeError, match=r"f32: our logits are 0.001 of the greatest from llama\.cpp's"):
        beside._apart("f32", ours, ours + 1e-3)
