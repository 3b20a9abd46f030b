"""One sequence on one device and over two, measured by two processes with gloo."""

import json

import pytest
import torch.distributed as dist
from _helpers import small_benchmark
from _helpers.programs import run_ranks, run_script


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo")
def test_two_processes(tmp_path):
    file = tmp_path / "results.json"
    teller, other = run_ranks(small_benchmark.__file__, 2, "--json", file)
    assert teller.returncode == other.returncode == 0, teller.stderr + other.stderr
    results = json.loads(file.read_text())
    rows = [(row["case"].split()[0], row["pass"]) for row in results["rows"]]
    assert rows == [(name, which) for name in ("Mamba2", "Mamba3") for which in ("fwd", "fwd+bwd")] + [
        ("Mamba", "fwd+bwd")
    ]
    for row in results["rows"]:
        assert row["devices"] == 2
        assert row["devices x"] == pytest.approx(row["one device ms"] / row["all devices ms"])
    assert (teller.stdout + other.stdout).count("one sequence over 2 devices") == 1  # one process tells
    assert (teller.stderr + other.stderr).count("Mamba2 B1 L75 d64 P32 N16 float32: fwd+bwd (7 of 7)\n") == 1


def test_without_torchrun_it_says_how():
    done = run_script(small_benchmark.FOLDER / "across_ranks.py")
    assert done.returncode == 2 and "start it with torchrun, as its first lines say" in done.stderr
