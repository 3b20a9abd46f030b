"""The benchmark for tests: run as typed, on problems so small that it takes seconds, and its modules by name."""

import dataclasses
import importlib.util
import os
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "benchmark"


def benchmark(*words, status=0, **environment):
    """The benchmark of the CPU with these words and environment variables, in a process of its own."""
    from _helpers.programs import run_script  # not in the process that runs this file

    # one thread: those of small problems wait for each other
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = run_script(__file__, *words, timeout=600, environ=environ)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def load(name):
    """A module of the benchmark; most need its folder on sys.path, as it is when it runs."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shrink(cases):
    """Every kind of case stays, one of each."""
    from kinds import Conv, ConvUpdate, CrossScan, Mamba3Scan, Mamba3Step, Norm, Scan, Ssd, Update
    from layer_kinds import Bidirectional, Block, Decode, Train

    f32, model = "float32", {"d_model": 64, "n_layer": 2}
    cases.CASES["cpu"] = {
        "scan": [
            Scan(1, 40, 8, 4, f32),
            Scan(2, 40, 8, 1, f32, groups=4, gated=False),
            Scan(1, 16, 16, 16, f32, passes=cases.SMALL),
        ],
        "ssd": [Ssd(2, 70, 2, 8, 16, f32)],
        "block": [Block("Mamba", 1, 40, 64, dtype=f32, passes=("fwd", "fwd+bwd"))],
        "mamba2": [Block("Mamba2", 1, 40, 64, 32, 16, dtype=f32, passes=("fwd", "fwd+bwd"))],
        "mamba3": [
            Mamba3Scan(2, 70, 2, 8, 16, dtype=f32),
            Mamba3Scan(2, 21, 2, 8, 16, 4, f32),
            Mamba3Step(2, 2, 8, 16, f32, f32),
            Block("Mamba3", 1, 40, 64, 32, 16, dtype=f32, passes=("fwd", "fwd+bwd")),
            Block("Mamba3 MIMO", 1, 40, 64, 32, 16, dtype=f32, passes=("fwd",)),
        ],
        "bidirectional": [
            Bidirectional("Mamba v2", 1, 40, 64, dtype=f32),
            Bidirectional("BiMamba2", 1, 40, 64, 32, 16, f32),
            Bidirectional("Hydra", 1, 40, 64, 32, 16, f32),
        ],
        "cross": [CrossScan(2, 8, 5, 7, 4, 2, f32)],
        "update": [Update(2, 0, 8, 4, f32), Update(2, 2, 8, 16, "bfloat16")],
        "conv": [Conv(1, 40, 8, dtype=f32), Conv(1, 40, 8, True, f32), ConvUpdate(2, 8, f32)],
        "norm": [Norm("add", 20, 40, f32), Norm("gated", 20, 40, f32)],
        "decode": [
            Decode("Mamba1", 1, f32, **model, prompt=4, new=2, passes=("step", "generate")),
            Decode("Mamba2", 3, f32, **model, prompt=4, new=2, passes=("step", "generate")),
        ],
        "train": [Train("Mamba2", 2, 16, **model, passes=("step",))],
    }
    cases.ACROSS_RANKS["cpu"] = [
        Block(layer, 1, 75, 64, 32, 16, f32, passes=("fwd", "fwd+bwd")) for layer in ("Mamba2", "Mamba3")
    ] + [Block("Mamba", 1, 75, 64, dtype=f32, passes=("fwd+bwd",))]
    cases.PLAIN_SCAN = dataclasses.replace(cases.PLAIN_SCAN, seqlen=32, dim=8)
    cases.PLAIN_SSDS = [dataclasses.replace(case, seqlen=32, heads=1) for case in cases.PLAIN_SSDS]
    cases.PLAIN_MAMBA3S = [dataclasses.replace(case, seqlen=32, heads=1) for case in cases.PLAIN_MAMBA3S]
    cases.PLAIN_BLOCK = dataclasses.replace(cases.PLAIN_BLOCK, seqlen=32, d_model=64)


def main(arguments):
    """As a rank of several, across_ranks.py."""
    sys.path.insert(0, str(FOLDER))
    import cases
    import plain
    import plain_mamba3
    import plain_scan
    import plain_ssd

    shrink(cases)
    plain_scan.VALIDATED_CHANNELS = 8
    # in this process, where the benchmark would start another one, of other sizes
    own = {
        "plain_scan": plain_scan.times,
        "plain_ssd": lambda number: plain_ssd.times(cases.PLAIN_SSDS[int(number)]),
        "plain_mamba3": lambda number: plain_mamba3.times(cases.PLAIN_MAMBA3S[int(number)]),
    }
    plain.in_own_process = lambda name, isa, script, *number: own[Path(script).stem](*number)
    script = FOLDER / "across_ranks.py" if "RANK" in os.environ else FOLDER
    sys.argv = ["benchmark", "--device", "cpu", *arguments]
    runpy.run_path(os.fspath(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
