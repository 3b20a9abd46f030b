"""src/mamba_ssm/_native says what csrc/include says: constants, structs by field, functions."""

import ctypes
import re
from pathlib import Path

import pytest

from mamba_ssm._native import abi, loader, signatures

HEADERS = Path(__file__).resolve().parents[2] / "csrc" / "include"
KINDS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


@pytest.fixture(scope="module")
def headers():
    """The text of all of them, without comments."""
    if not HEADERS.is_dir():
        pytest.skip("the headers are not beside these tests")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(HEADERS.glob("*.h")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def declared_structs(headers):
    """{struct: [(field, ctypes type)]} of the headers."""
    structs = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", headers, flags=re.DOTALL):
        fields = []
        for declaration in body.split(";"):
            declaration = " ".join(declaration.split())
            if not declaration:
                continue
            kind, names = re.fullmatch(r"(?:const )?(\w+\s*\*?)\s*(.+)", declaration).groups()
            for field in names.split(","):
                field = field.strip()
                array = re.fullmatch(r"(\w+)\[(\d+)\]", field)
                if array:
                    fields.append((array[1], ctypes.c_char * int(array[2])))
                elif "*" in kind or field.startswith("*"):
                    fields.append((field.lstrip("* "), ctypes.c_void_p))
                else:
                    fields.append((field, KINDS.get(kind.strip()) or getattr(abi, kind.strip())))
        structs[name] = fields
    return structs


def test_structs(headers):
    declared = declared_structs(headers)
    assert set(declared) == {struct.__name__ for struct in abi.STRUCTS}
    for struct in abi.STRUCTS:
        ours = [(name, kind) for name, kind, *_ in struct._fields_]
        assert [name for name, _ in ours] == [name for name, _ in declared[struct.__name__]], struct.__name__
        assert ours == declared[struct.__name__], struct.__name__


def test_constants(headers):
    constants = {name: int(value) for name, value in re.findall(r"#define MAMBA_(\w+) (\d+)", headers)}
    assert constants["ABI_VERSION"] == abi.ABI_VERSION
    for name, value in constants.items():
        assert getattr(abi, name) == value, name


def test_functions(headers):
    declared = dict(re.findall(r"MAMBA_API [\w ]+?\*? ?mamba_(\w+)\(([^)]*)\)", headers))
    ours = {*signatures.FUNCTIONS, *signatures.SIZE_FUNCTIONS, "struct_size", "last_error"}
    assert set(declared) == ours
    for name, struct in signatures.FUNCTIONS.items():
        assert struct.__name__ in declared[name], name
        assert declared[name].count(",") == len(signatures.MORE_ARGUMENTS.get(name, [])), name


def test_library_agrees():
    functions = loader.load("cpu")
    for struct in abi.STRUCTS:
        assert functions["struct_size"](struct.__name__.encode()) == ctypes.sizeof(struct)
    assert functions["struct_size"](b"no such struct") == 0
    facts = loader.info("cpu")
    assert facts.abi_version == abi.ABI_VERSION
    assert facts.is_cuda == 0
    assert facts.isa in (b"generic", b"avx2", b"avx512")
