"""Measures the package on this machine: python scripts/benchmark [--device cuda|cpu] [--only scan,block] [--json FILE].

Every section validates its results against a float64 reference before it times them; a wrong result is an error, exit
code 1. Figures of other software are quoted with their source, never measured here.
"""

import argparse
import importlib.util
import json
import sys
import time
import traceback

import cases
import progress
import torch
from table import cell, table
from timing import machine

SECTIONS = {
    "cuda": ("scan", "block", "mamba2", "conv", "norm", "decode", "small", "ssd", "lm", "transformers"),
    "cpu": ("cpu", "ssd", "mamba2", "lm", "transformers"),
}


def _section(name):
    """The function that measures a section; a CPU-only run does not import the GPU's."""
    if name == "cpu":
        import cpu

        return cpu.cpu
    if name == "ssd":
        import ssd

        return ssd.ssd
    if name in ("block", "mamba2"):
        import blocks

        return getattr(blocks, name)
    if name in ("lm", "transformers"):
        import models

        return getattr(models, name)
    if name == "norm":
        import norms

        return norms.norm
    import gpu

    return getattr(gpu, name)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python scripts/benchmark", description=__doc__)
    parser.add_argument("--device", choices=tuple(SECTIONS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", help=f"sections, comma separated: {', '.join(dict.fromkeys(sum(SECTIONS.values(), ())))}"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args(arguments)
    available = SECTIONS[options.device]
    options.sections = options.only.split(",") if options.only else list(available)
    if not options.only and importlib.util.find_spec("transformers") is None:
        options.sections.remove("transformers")
        print("transformers is not installed: its section is left out")
    for name in options.sections:
        if name not in available:
            parser.error(f"--only: on {options.device} the sections are {', '.join(available)}, got {name!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    return options


def main(arguments=None):
    options = parse(arguments)
    facts = machine(options.device)
    print(", ".join(f"{key} {cell(value)}" for key, value in facts.items()))
    if options.device == "cuda":
        print(f"upstream's figures: {cases.UPSTREAM_SOURCE}")
    results, failed = {"machine": facts, "upstream": cases.UPSTREAM_SOURCE, "sections": {}}, False
    for name in options.sections:
        start = time.perf_counter()
        progress.section(name)
        try:
            rows = _section(name)(facts)
        except Exception:  # the other sections' figures are still wanted
            failed = True
            results["sections"][name] = {"error": traceback.format_exc()}
            progress.clear()
            print(f"\n{name}: FAILED\n{results['sections'][name]['error']}", flush=True)
            continue
        seconds = time.perf_counter() - start
        results["sections"][name] = {"rows": rows, "seconds": seconds}
        progress.clear()
        print(f"\n{table(f'{name} ({seconds:.0f} s)', rows)}", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
