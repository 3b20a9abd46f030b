"""The benchmark on the CPU, run as typed: beside a copy of this package, beside plain torch, and where a side fails."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from _helpers.programs import run_code
from _helpers.small_benchmark import FOLDER, benchmark

import mamba_ssm

SECTIONS = ["scan", "ssd", "block", "mamba2", "mamba3", "bidirectional", "cross", "update", "conv", "norm", "decode"]
SECTIONS += ["train"]


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """Our own package in another folder, with another version and without the norms."""
    folder = tmp_path_factory.mktemp("peer")
    package = folder / "mamba_ssm"
    shutil.copytree(Path(mamba_ssm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "version.py").write_text('__version__ = "1.2.3"\n')
    (package / "ops" / "triton" / "layernorm_gated.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def compared(peer, tmp_path_factory):
    """(what it printed, its JSON, its Markdown) of all sections beside that peer."""
    file = tmp_path_factory.mktemp("results") / "results.json"
    done = benchmark("--peer", peer, "--json", file, "--markdown", file.with_suffix(".md"))
    return done, json.loads(file.read_text()), file.with_suffix(".md").read_text()


def test_every_case_is_measured_on_both_sides(compared, peer):
    done, results, _ = compared
    table = [line for line in done.stdout.splitlines() if "ours: " not in line and "peer: " not in line]
    assert max(map(len, table)) <= 120, done.stdout
    assert list(results["sections"]) == SECTIONS
    assert f"mamba_ssm 1.2.3 in {peer}" in done.stdout
    assert f"mamba_ssm {mamba_ssm.__version__} in {Path(mamba_ssm.__file__).parent}" in done.stdout
    others = {"bidirectional": "one way", "cross": "four copies"}  # ours too
    for name, section in results["sections"].items():
        for record in section["records"]:
            gated = "gated" in record["case"]
            both = {"ours", others.get(name, "peer")}
            assert set(record["failed"]) == ({"peer"} if gated else set()), record
            assert record["passes"], record
            for which, modes in record["passes"].items():
                assert list(modes) == (["tokens"] if which == "generate" else ["call"])
                for sides in modes.values():
                    assert set(sides) == ({"ours"} if gated else both), (name, record)
                    assert all(side["seconds"] > 0 for side in sides.values())


def test_markdown_has_the_tables_that_were_printed(compared):
    done, results, text = compared
    assert "ours: mamba_ssm 2" in text.splitlines()[0]
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert headings[-1] == "Columns" and len(headings) == len(set(headings))
    assert set(SECTIONS) <= {heading.partition(":")[0] for heading in headings}
    assert all(f"\n{heading} (" in done.stdout for heading in headings[:-1])
    for section in results["sections"].values():
        for record in section["records"]:
            assert f"\n| {record['case']} | " in text


def test_what_the_peer_lacks_is_said(compared):
    done, *_ = compared
    assert "gated 20 x 40 float32: peer: comparing with float64: lacks it: module" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("gated") and " fwd " in line)
    assert row.split()[-2:] == ["-", "-"]


def test_each_column_is_explained_once_and_progress_is_told(compared):
    done, *_ = compared
    for column in ("call ours ms", "call peer ms", "call x", "ours tokens/s"):
        assert sum(line.startswith(f"  {column} ") for line in done.stdout.splitlines()) == 1
    for name in SECTIONS:
        assert f"s] {name}: " in done.stderr
    assert "scan: B1 L40 D8 N4 float32: peer, bwd, call (4 of 4)" in done.stderr


def test_a_peer_may_be_causal_conv1d_alone(tmp_path):
    """And mamba_ssm, which its process finds too, is not taken for the peer's."""
    package = tmp_path / "causal_conv1d"
    package.mkdir()
    (package / "__init__.py").write_text("from mamba_ssm.ops.causal_conv1d import *\n__version__ = '1.6'\n")
    done = benchmark("--peer", tmp_path, "--only", "conv,scan", "--quick")
    assert f"peer: causal_conv1d 1.6 in {package}" in done.stdout
    assert f"float32: peer: comparing with float64: lacks it: no mamba_ssm in {tmp_path}" in done.stdout
    conv, scan = (line.split()[-1] for line in done.stdout.splitlines() if "  fwd  " in line)
    assert float(conv) > 0 and scan == "-"


WRONG = """
def wrong(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.5
selective_state_update = wrong(selective_state_update)
"""


def broken(peer, folder, **lines):
    """The peer with lines more at the end of modules of ops/triton."""
    shutil.copytree(peer, folder)
    for name, line in lines.items():
        with open(folder / "mamba_ssm" / "ops" / "triton" / f"{name}.py", "a", encoding="utf-8") as file:
            file.write(line)
    return folder


def test_a_peer_that_fails_is_named_and_the_rest_is_measured(peer, tmp_path):
    folder = broken(
        peer,
        tmp_path / "broken",
        selective_state_update=WRONG,
        ssd_combined="import os; print('last words', flush=True); os._exit(3)",
        layer_norm="import time; time.sleep(1000)",
    )
    # only the operators' own modules are broken: the package itself can be imported
    file, sections = tmp_path / "results.json", "update,ssd,norm,scan"
    done = benchmark("--peer", folder, "--only", sections, "--quick", "--limit", 8, "--json", file)
    for said in (
        "is wrong: out: relative error ",
        "its process ended with 3\nlast words",
        "took more than 8 s (--limit)",
    ):
        assert f"peer: comparing with float64: {said}" in done.stdout
    sections = json.loads(file.read_text())["sections"]
    for name in ("update", "ssd", "norm"):
        assert set(sections[name]["records"][0]["passes"].popitem()[1]["call"]) == {"ours"}
    assert set(sections["scan"]["records"][0]["passes"]["fwd"]["call"]) == {"ours", "peer"}


def test_alone_there_is_no_comparison_and_a_wrong_result_is_exit_code_1(peer, tmp_path):
    wrong = broken(peer, tmp_path / "wrong", selective_state_update=WRONG.replace("1.5", "1.05"))
    file = tmp_path / "results.json"
    done = benchmark("--only", "update,scan", "--quick", "--json", file, status=1, PYTHONPATH=str(wrong))
    assert "ours: comparing with float64: is wrong: out: rms error 5.0" in done.stdout
    assert "call ours ms" in done.stdout and "peer" not in done.stdout
    (record,) = json.loads(file.read_text())["sections"]["scan"]["records"]  # the first case only
    assert all(set(sides) == {"ours"} for modes in record["passes"].values() for sides in modes.values())


def test_arguments_that_cannot_work(tmp_path):
    expected = {
        ("--peer", tmp_path / "none"): "is no folder",
        ("--peer", tmp_path): f"neither mamba_ssm nor causal_conv1d lies in {tmp_path}",
        ("--only", "scan,skan"): "on cpu the sections are scan, ",
        ("--plot", "speed.pdf"): "must end in .svg or .png, got speed.pdf",
        ("--threads", "1,0"): "--threads: positive integers with commas between, got '1,0'",
    }
    code = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
parse = runpy.run_path({str(FOLDER / "__main__.py")!r})["parse"]
for words in {[["--device", "cpu", *map(str, words)] for words in expected]!r}:
    try:
        parse(words)
    except SystemExit as error:
        print("exit", error.code)
"""
    done = run_code(code)
    assert done.stdout.split("\n") == ["exit 2"] * len(expected) + [""], done.stderr
    for said in expected.values():
        assert said in done.stderr


def test_beside_plain_torch():
    sections = ["plain-scan", "plain-ssd", "plain-mamba3", "plain-block"]
    done = benchmark("--only", ",".join(sections))
    for section in sections:
        assert sum(f"s] {section}: " in line for line in done.stderr.splitlines()) >= 3, done.stderr
        assert f"\n\n{section} (" in done.stdout
    assert "\n  fwd+bwd x " in done.stdout and "threads" in done.stdout


def test_plot_without_matplotlib_is_an_error_before_anything_is_measured(tmp_path):
    if importlib.util.find_spec("matplotlib") is not None:
        pytest.skip("matplotlib is installed")
    assert (
        '--plot needs matplotlib: pip install matplotlib, or "mamba_ssm[plot]"'
        in benchmark("--plot", tmp_path / "speed.svg", status=2).stderr
    )


def test_progress_of_a_process_of_its_own_is_shown_and_its_error_told(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import sys\nprint('step 1', file=sys.stderr, flush=True)\nprint('[1]')\nsys.exit(len(sys.argv) - 1)"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import plain, progress; progress.section('cpu')\n"
        f"print(plain.in_own_process('small', None, {str(child)!r}))\n"
        f"plain.in_own_process('small', 'avx2', {str(child)!r}, 'fail')"
    )
    done = run_code(code)
    assert done.stdout == "[1]\n"
    assert "s] cpu: small: step 1\n" in done.stderr
    assert done.stderr.splitlines()[-2:] == ["RuntimeError: small with MAMBA_SSM_CPU_ISA=avx2 failed:", "step 1"]
