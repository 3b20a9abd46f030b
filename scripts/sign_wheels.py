"""Writes SHA256SUMS beside wheels, and on request its detached signature: python scripts/sign_wheels.py dist [--sign]

--sign [KEY] calls gpg, which holds the keys and asks for what it needs. Whoever receives the folder checks it with
`sha256sum -c SHA256SUMS` and `gpg --verify SHA256SUMS.asc SHA256SUMS`. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIST, SIGNATURE = "SHA256SUMS", "SHA256SUMS.asc"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes SHA256SUMS for the wheels of a folder, and signs it.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the wheels are")
    parser.add_argument("--sign", nargs="?", const="", metavar="KEY", help="sign with gpg's default key, or with KEY")
    given = parser.parse_args(words)
    gpg = shutil.which("gpg")
    if given.sign is not None and gpg is None:
        parser.error("--sign needs gpg, which is not installed here (on Debian: apt install gnupg)")
    wheels = sorted(given.folder.glob("*.whl"))
    if not wheels:
        parser.error(f"there is no wheel in {given.folder}")

    # An old signature must not stand beside a new list, not even when gpg fails below.
    (given.folder / SIGNATURE).unlink(missing_ok=True)
    lines = [f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels]
    fresh = given.folder / f"{LIST}.new"
    fresh.write_text("".join(lines), encoding="utf-8", newline="\n")
    os.replace(fresh, given.folder / LIST)
    print("".join(lines), end="")
    if given.sign is None:
        return 0
    key = ["--local-user", given.sign] if given.sign else []
    return subprocess.call([gpg, "--armor", *key, "--detach-sign", "--output", SIGNATURE, LIST], cwd=given.folder)


if __name__ == "__main__":
    sys.exit(main())
