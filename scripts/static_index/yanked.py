"""Which wheels of an index are yanked (PEP 592), and why: the site's yanked.txt.

Lines of text, as in SHA256SUMS: file names hold + and ., which TOML and YAML would want quoted, and no spaces.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

NAME = "yanked.txt"
TEXT = """\
# Wheels that pip and uv no longer take, unless a user pins their version with == (PEP 592). They stay on the index.
# One line a wheel: its file name, a space, and the reason, which users see, as they see this file. For example:
#   mamba_ssm-2.4.0+cu130-py3-none-win_amd64.whl  Wrong gradients on compute capability 12.0: take 2.4.1
# Run scripts/make_index.py after a change. Delete a line to offer its wheel again.
"""


class WrongEntry(Exception):
    """yanked.txt cannot be followed; the text is the reasons, a line each."""


def read_yanked(site: Path, published: Collection[str], before: Collection[str]) -> dict[str, str]:
    """{file name: reason}.

    published: names of all wheels of the index. before: of those that its pages say are yanked. Raises WrongEntry for a
    line that is none, for an unknown name, since the wheel that was meant would stay on offer, and for a lost file.
    """
    path = site / NAME
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        if before:
            raise WrongEntry(
                f"{path} is gone, and the pages say that these wheels are yanked: {', '.join(sorted(before))}. Restore "
                "the file; to offer the wheels again, make an empty one of this name"
            ) from None
        return {}
    except UnicodeDecodeError as error:
        raise WrongEntry(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    found: dict[str, str] = {}
    problems = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        name, reason = words[0], words[1].strip() if len(words) > 1 else ""
        wrong = _wrong(name, reason, published, found)
        if wrong:
            problems.append(f"{path}, line {number}: {wrong}")
        else:
            found[name] = reason
    if problems:
        raise WrongEntry("\n".join(problems))
    return found


def _wrong(name: str, reason: str, published: Collection[str], found: Collection[str]) -> str | None:
    if name not in published:
        near = difflib.get_close_matches(name, published, n=1)
        return f"{name!r} is no wheel of this index{f' (did you mean {near[0]}?)' if near else ''}"
    if not reason:
        return f"{name} has no reason: write behind the name what is wrong with the wheel, and what to take instead"
    if not reason.isprintable():
        return f"the reason of {name} holds a character that cannot be shown: {reason!r}"
    return f"{name} is there twice: keep one line" if name in found else None
