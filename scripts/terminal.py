"""Prints texts that may come out of a file that anybody made, such as a name in RECORD or a symbol of a library."""

from __future__ import annotations

import sys
from typing import TextIO


def say(*lines: str, file: TextIO | None = None) -> None:
    """Prints each of `lines` as one line, on stdout by default, with nothing in it that moves the cursor."""
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    for line in lines:
        # What this stream has no bytes for, such as most letters on some of Windows' consoles, is escaped too.
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)


def printable(text: str) -> str:
    """The text with a backslash escape for what is not printable: control characters, line ends, lone surrogates."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )
