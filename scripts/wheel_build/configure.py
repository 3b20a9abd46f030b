"""`python setup.py configure`: prints the plan and the findings, builds nothing, exits 1 on a fatal one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .plan import load, show

USAGE = """usage: python setup.py configure [--editable] [--json]

Prints what a build would do here (tools, architectures, dtypes, jobs, wheel name) and what stands in its way.
Builds nothing. Exit status: 0, or 1 when a finding is fatal.

  --editable  the plan of `pip install -e .`, which compiles for this machine, instead of a wheel's
  --json      the same for machines, on standard output"""


def main(root: Path, words: Sequence[str]) -> int:
    unknown = [word for word in words if word not in ("--editable", "--json", "-h", "--help")]
    if unknown:
        print(f"configure: unknown argument {unknown[0]!r}\n\n{USAGE}")
        return 2
    if "-h" in words or "--help" in words:
        print(USAGE)
        return 0
    plan = load(root, in_place="--editable" in words)
    show(plan.as_json() if "--json" in words else plan.as_text())
    return 1 if plan.fatal else 0
