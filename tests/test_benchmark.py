"""The CPU benchmark, on problems so small that it takes seconds: it says what it does and explains what it prints."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "benchmark"
# Runs it as typed, but measures small problems, in this process where it would start others.
SMALL = """
import dataclasses, os, runpy, sys
sys.path.insert(0, sys.argv[1])
import cases, cpu, ssd
cases.CPU_SCAN = dataclasses.replace(cases.CPU_SCAN, seqlen=32, dim=8)
cases.CPU_SSDS = [dataclasses.replace(case, seqlen=32, heads=1) for case in cases.CPU_SSDS]
cases.MAMBA2_CPU_BLOCK = dataclasses.replace(cases.MAMBA2_CPU_BLOCK, seqlen=32, d_model=64)
cases.LMS["cpu"] = [dataclasses.replace(case, new=2, n_layer=1, d_model=64) for case in cases.LMS["cpu"]]
cases.LM_PROMPT, cases.LM_VALIDATED, cpu.VALIDATED_CHANNELS = 4, 4, 8
cpu.in_own_process = lambda name, isa, script, *number: (
    ssd.measure(cases.CPU_SSDS[int(number[0])]) if number else cpu.measure()
)
sys.argv = ["benchmark", "--device", "cpu", *sys.argv[2:]]
runpy.run_path(os.path.dirname(cases.__file__), run_name="__main__")
"""


@pytest.mark.parametrize("section", ["cpu", "ssd", "mamba2", "lm"])
def test_a_section_tells_its_steps_and_explains_its_columns(section):
    words = [sys.executable, "-c", SMALL, str(FOLDER), "--only", section]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120, done.stdout
    steps = [line for line in done.stderr.splitlines() if f"s] {section}: " in line]
    assert len(steps) >= 3, done.stderr
    heading, explanations = done.stdout.split("\n\n")[1:3]
    assert heading.startswith(f"{section} (") and "\n" in heading
    assert explanations.startswith("  case  ") and "threads" in heading + explanations


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_table_of_long_headings_stays_narrow_and_needs_every_column_explained():
    module = load("table")
    columns = [
        "fwd no grad ms",
        "upstream fwd+bwd",
        "fwd+bwd x",
        "goal x",
        "exp floor ms",
        "fwd of copy",
        "load",
        "upstream kept MB",
        "peak in (B,L,D)",
        "bwd ms",
    ]
    row = {"case": "B1 L131072 D4096 N16 bfloat16", **dict.fromkeys(columns, 1234.5)}
    text = module.table("title", [row])
    assert len("  ".join(row)) > 120 and max(map(len, text.splitlines())) <= 120, text
    with pytest.raises(KeyError, match="unheard"):
        module.table("title", [{"case": "", "unheard of": 1}])


def test_progress_of_a_process_of_its_own_is_shown_and_its_error_told(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import sys\nprint('step 1', file=sys.stderr, flush=True)\nprint('[1]')\nsys.exit(len(sys.argv) - 1)"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import cpu, progress; progress.section('cpu')\n"
        f"print(cpu.in_own_process('small', None, {str(child)!r}))\n"
        f"cpu.in_own_process('small', 'avx2', {str(child)!r}, 'fail')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[1]\n"
    assert "s] cpu: small: step 1\n" in done.stderr
    assert done.stderr.splitlines()[-2:] == ["RuntimeError: small with MAMBA_SSM_CPU_ISA=avx2 failed:", "step 1"]
