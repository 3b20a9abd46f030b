"""Says whether wheels are fit to publish: python scripts/verify_wheel.py dist/*.whl

A line for each wheel, each problem, and each note, of what could not be checked; exit status 1 if any wheel has a
problem. What is looked at: scripts/wheel_check.
Verifies Linux and Windows wheels on either system, and needs the extra: pip install "WHEEL[publish]"
"""

from __future__ import annotations

import argparse
import sys

try:
    from wheel_check import verify_to_publish
    from wheel_check.wheel import find_wheels
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name and error.name.startswith("wheel_check")):
        raise
    sys.exit(
        f"verify_wheel.py needs {error.name}, which is not installed here; with the file of any wheel of mamba_ssm do: "
        'pip install "WHEEL[publish]"'
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Says whether wheels of mamba_ssm are fit to publish.")
    parser.add_argument("wheels", nargs="+", metavar="WHEEL", help="such as dist/*.whl")
    status = 0
    for path in find_wheels(parser.parse_args(words).wheels):
        problems, notes = verify_to_publish(path)
        print(f"{path}: {'refused' if problems else 'fit to publish'}")
        for line in [*problems, *(f"note: {note}" for note in notes)]:
            print(f"  {line}")
        status = 1 if problems else status
    return status


if __name__ == "__main__":
    sys.exit(main())
