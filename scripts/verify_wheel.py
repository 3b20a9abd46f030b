"""Says whether wheels are fit to publish: python scripts/verify_wheel.py dist/*.whl

A line for each wheel, each problem, and each note, of what could not be checked; exit status 1 if any wheel has a
problem. What is looked at: scripts/wheel_check.
Verifies Linux and Windows wheels on either system, and needs the extra: pip install "WHEEL[publish]"
"""

from __future__ import annotations

import argparse
import sys

from terminal import say

try:
    from wheel_check import UnknownRef, verify_to_publish
    from wheel_check.wheel import find_wheels
    from wheel_gate import add_verify_options, check_verify_options
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name and error.name.startswith("wheel_")):
        raise
    sys.exit(
        f"verify_wheel.py needs {error.name}, which is not installed here; with the file of any wheel of mamba_ssm do: "
        'pip install "WHEEL[publish]"'
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Says whether wheels of mamba_ssm are fit to publish.")
    parser.add_argument("wheels", nargs="+", metavar="WHEEL", help="such as dist/*.whl")
    add_verify_options(parser, strict=False)
    given, status = parser.parse_args(words), 0
    check_verify_options(parser, given)
    for path in find_wheels(given.wheels):
        try:
            verdict = verify_to_publish(path, strict=given.strict, allow_commits=given.allow_commits)
        except UnknownRef as error:
            parser.error(f"--allow-commits: {error}")
        say(f"{path}: {'refused' if verdict.problems else 'fit to publish'}")
        say(*(f"  {problem}" for problem in verdict.problems), *(f"  note: {note}" for note in verdict.notes))
        status = 1 if verdict.problems else status
    return status


if __name__ == "__main__":
    sys.exit(main())
