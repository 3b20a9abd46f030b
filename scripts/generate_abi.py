"""Writes mamba_ssm/_native/abi.py, the C ABI in ctypes, from the headers in csrc/include.

python scripts/generate_abi.py           after a change of a header
python scripts/generate_abi.py --check   exit status 1 if the file is not what the headers say
"""

from __future__ import annotations

import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ("mamba_types.h", "mamba_scans.h", "mamba_layers.h", "mamba_kernels.h")  # each needs those before it
TARGET = ROOT / "mamba_ssm" / "_native" / "abi.py"
TYPES = {"int32_t": "i32", "int64_t": "i64", "float": "f32"}
RESULTS = {"int32_t": "c_int32", "int64_t": "c_int64", "const char*": "c_char_p"}
WIDTH = 120

HEAD = '''\
"""The C ABI of csrc/include in ctypes: constants, structs, functions. Written by scripts/generate_abi.py; do not edit.

Structs inside structs are anonymous, so their fields are set directly: ``params.stream``, not ``params.run.stream``.
"""

import typing
from ctypes import POINTER, Structure, c_char, c_char_p, c_float, c_int32, c_int64, c_void_p

{constants}


def _fields(text: str, /, **structs: typing.Any) -> list[tuple[str, typing.Any]]:
    """Field list from lines of "type: names", so that a struct reads like its declaration."""
    kinds = {{"i32": c_int32, "i64": c_int64, "f32": c_float, "ptr": c_void_p, **structs}}
    fields = []
    for line in text.split(";"):
        kind, names = line.split(":")
        fields += [(name.strip(), kinds[kind.strip()]) for name in names.split(",")]
    return fields


{structs}


STRUCTS = (
{names}
)

# {{name without mamba_: (the type that it returns, the types that it takes)}}
FUNCTIONS = {{
{functions}
}}
'''


class HeaderError(Exception):
    """A declaration that has no counterpart in ctypes here."""


def generate(headers: str) -> str:
    """The text of abi.py. Raises HeaderError for a declaration that it does not know."""
    code = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    constants = re.findall(r"^#define MAMBA_(\w+) (\d+)\s*$", code, re.MULTILINE)
    structs = re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", code, re.DOTALL)
    functions = re.findall(r"^MAMBA_API (.*?) ?mamba_(\w+)\((.*?)\);", code, re.MULTILINE | re.DOTALL)
    names = [name for _, name in structs]
    return HEAD.format(
        constants="\n".join(f"{name} = {value}" for name, value in constants),
        structs="\n\n\n".join(struct(name, body, names) for body, name in structs),
        names="\n".join(f"    {name}," for name in names),
        functions="\n".join(function(*words, names) for words in functions),
    )


def struct(name: str, body: str, known: list[str]) -> str:
    """The class of one struct. Declarations of one type that follow each other are one line, or as many as it takes."""
    fields = [field(declaration, known) for declaration in body.split(";") if declaration.strip()]
    rows, inner, more = [], [], []
    for kind, group in groupby(fields, key=lambda one: one[0]):
        row = f"{kind}: {', '.join(name for _, names in group for name in names)};"
        wrapped = textwrap.wrap(row, WIDTH - 8, subsequent_indent=" " * (len(kind) + 2), break_on_hyphens=False)
        rows += wrapped
        if kind in known:
            inner.append(row.partition(": ")[2].rstrip(";"))
            more.append(f"{kind}={kind}")
        if kind.startswith("text"):
            more.append(f"{kind}=c_char * {kind.removeprefix('text')}")
    rows[-1] = rows[-1].removesuffix(";")
    lines = [f"class {name}(Structure):"]
    if inner:
        lines.append(f"    _anonymous_ = ({', '.join(repr(one) for one in inner)},)".replace("'", '"'))
    if not more and len(" ".join(rows)) < WIDTH - 30:
        return "\n".join([*lines, f'    _fields_ = _fields("{" ".join(rows)}")'])
    lines += ["    _fields_ = _fields(", '        """', *(f"        {row}" for row in rows)]
    lines += ['        """,', *(f"        {one}," for one in more), "    )"]
    return "\n".join(lines)


def field(declaration: str, known: list[str]) -> tuple[str, list[str]]:
    """(i32, i64, f32, ptr, a struct's name or textN, field names) of one declaration."""
    words = re.sub(r" ?\* ?", "*", " ".join(declaration.split()))
    pointer = re.fullmatch(r"(?:const )?\w+\*(\w+(?:, ?\*\w+)*)", words)
    if pointer:
        return "ptr", [name.strip(" *") for name in pointer[1].split(",")]
    array = re.fullmatch(r"char (\w+)\[(\d+)\]", words)
    if array:
        return f"text{array[2]}", [array[1]]
    plain = re.fullmatch(r"(\w+) (\w+(?:, \w+)*)", words)
    if plain and (plain[1] in TYPES or plain[1] in known):
        return TYPES.get(plain[1], plain[1]), plain[2].split(", ")
    raise HeaderError(f"this declaration has no counterpart in ctypes here: {words}")


def function(result: str, name: str, parameters: str, known: list[str]) -> str:
    taken = [argument(" ".join(one.split()), known) for one in parameters.split(",") if one.strip() != "void"]
    if result not in RESULTS:
        raise HeaderError(f"mamba_{name} returns {result}, which has no counterpart in ctypes here")
    return f'    "{name}": ({RESULTS[result]}, [{", ".join(taken)}]),'


def argument(words: str, known: list[str]) -> str:
    kind = words.rpartition(" ")[0].removeprefix("const ")
    if kind.removesuffix("*") in known:
        return f"POINTER({kind.removesuffix('*')})"
    return {"char*": "c_char_p", "int32_t": "c_int32", "void*": "c_void_p", "void**": "POINTER(c_void_p)"}[kind]


def read_headers() -> str:
    return "\n".join((ROOT / "csrc" / "include" / name).read_text(encoding="utf-8") for name in HEADERS)


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    text = generate(read_headers())
    if not words:
        TARGET.write_text(text, encoding="utf-8", newline="\n")
    elif TARGET.read_text(encoding="utf-8") != text:
        print(f"{TARGET.relative_to(ROOT)} is not what csrc/include says: python scripts/generate_abi.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
