"""mamba_ssm/_native/abi.py is what csrc/include says, to scripts/generate_abi.py, a C compiler and the library."""

import ctypes
import shutil
import subprocess
import sys

import generate_abi
import pytest

from mamba_ssm._native import abi, loader

PRINT_LAYOUT = """
#include <stddef.h>
#include <stdio.h>
#include "mamba_kernels.h"
#define FIELD(type, name) printf(#type "." #name " %zu %zu\\n", offsetof(type, name), sizeof(((type*)0)->name));
int main(void) {{ {fields} return 0; }}
"""

NEW_STRUCT = """
#define MAMBA_LIMIT 7 /* why */
typedef struct MambaRun { void* stream; int32_t device; } MambaRun;
typedef struct MambaNew {
    MambaRun run; /* where */
    const float *a, *b;
    int64_t rows, columns;
    char name[8];
} MambaNew;
MAMBA_API int64_t mamba_new_workspace(const MambaNew* params);
"""


@pytest.fixture(scope="module")
def headers():
    if not (generate_abi.ROOT / "csrc" / "include").is_dir():
        pytest.skip("the headers are not beside these tests")
    return generate_abi.read_headers()


def test_the_file_is_what_the_headers_say(headers):
    text = generate_abi.TARGET.read_text(encoding="utf-8")
    assert text == generate_abi.generate(headers), "out of date; run: python scripts/generate_abi.py"


def test_fields_lie_where_a_c_compiler_puts_them(headers, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    expected = [
        (f"{struct.__name__}.{name}", getattr(struct, name).offset, getattr(struct, name).size)
        for struct in abi.STRUCTS
        for name, _ in struct._fields_
    ]
    fields = " ".join(f"FIELD({place.replace('.', ', ')})" for place, *_ in expected)
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(PRINT_LAYOUT.format(fields=fields))
    include = generate_abi.ROOT / "csrc" / "include"
    subprocess.run([compiler, "-I", include, source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert [(place, int(at), int(size)) for place, at, size in map(str.split, printed.splitlines())] == expected


@pytest.mark.parametrize(
    "declaration",
    ["double x;", "int32_t x[4];", "struct Other y;", "MambaLater z;", "void (*call)(int);", "unsigned n : 3;"],
)
def test_a_declaration_without_a_counterpart_is_refused(declaration):
    header = f"typedef struct MambaNew {{ int64_t rows; {declaration} }} MambaNew;"
    with pytest.raises(generate_abi.HeaderError, match="has no counterpart in ctypes here"):
        generate_abi.generate(header)


def test_a_new_struct_and_its_function(tmp_path):
    file = tmp_path / "generated.py"
    file.write_text(generate_abi.generate(NEW_STRUCT))
    check = (
        "import ctypes, generated as abi;"
        "new = abi.MambaNew(stream=1, device=2, a=3, b=4, rows=5, columns=6, name=b'x');"
        "assert (new.run.device, new.b, new.columns, new.name, abi.LIMIT) == (2, 4, 6, b'x', 7);"
        "assert abi.FUNCTIONS == {'new_workspace': (ctypes.c_int64, [ctypes.POINTER(abi.MambaNew)])}"
    )
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True)


def test_library_agrees():
    functions = loader.load("cpu")
    for struct in abi.STRUCTS:
        assert functions["struct_size"](struct.__name__.encode()) == ctypes.sizeof(struct)
    assert functions["struct_size"](b"no such struct") == 0
    facts = loader.info("cpu")
    assert facts.abi_version == abi.ABI_VERSION
    assert facts.is_cuda == 0
    assert facts.isa in (b"generic", b"avx2", b"avx512")
