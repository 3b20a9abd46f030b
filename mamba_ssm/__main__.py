"""`python -m mamba_ssm`: the doctor. Says what is installed, whether it fits this machine, and whether it computes.

Exit code 0: every device that torch can use works with this package. 1: one does not (a library that does not load, a
GPU that this wheel cannot drive, wrong numbers), and the verdict says which and what to do.
"""

import argparse
import json
import sys

from mamba_ssm._doctor import examine, render


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mamba_ssm", description="Checks this installation of mamba_ssm.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    report = examine()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0 if report["healthy"] else 1


if __name__ == "__main__":
    sys.exit(main())
