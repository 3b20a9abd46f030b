"""The table of kernels: a stand-in for the library, then the real one where there is one."""

import ctypes

import kernels_page
import pytest
import torch
from _helpers import cuda_library, reached
from _helpers.programs import run_script

from mamba_ssm import __main__
from mamba_ssm._native import abi, loader
from mamba_ssm._native.errors import NativeError
from mamba_ssm.utils import kernels

TEXTS = [
    ("b_op", "narrow", "dstate 16", "32 channels", 0b110, 90),
    ("b_op", "any", "", "64 channels", 0b111, 75),
    ("a_op", "any", "", "rows", 0b001, 80),
]


class StandIn:
    """A library with two tables, whose calls count as the launcher would."""

    def __init__(self):
        self.texts = [[text.encode() for text in row[:4]] for row in TEXTS]
        self.counts = {}
        self.enabled = [1] * len(TEXTS)
        self.functions = {
            "kernel_count": lambda: len(TEXTS),
            "kernel": self.kernel,
            "kernel_launches": lambda index, dtype: self.counts.get((index, dtype), 0),
            "kernel_enable": self.enable,
            "last_error": lambda: b"",
        }

    def kernel(self, index, row):
        address = [ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value for text in self.texts[index]]
        row.op, row.name, row.needs, row.shape = address
        row.dtypes, row.architecture = TEXTS[index][4:]
        row.threads, row.shared_bytes, row.enabled = 128, 1024, self.enabled[index]
        return abi.OK

    def enable(self, index, enabled):
        self.enabled[index] = enabled
        return abi.OK

    def launch(self, index, dtype):
        self.counts[index, dtype] = self.counts.get((index, dtype), 0) + 1


@pytest.fixture
def stand_in(monkeypatch):
    library = StandIn()
    monkeypatch.setitem(loader.libraries, "cuda", library.functions)
    return library


def test_kernels_by_operator_in_order_of_preference(stand_in):
    found = kernels.kernels()
    assert [kernel.id for kernel in found] == ["a_op/any", "b_op/narrow", "b_op/any"]
    assert found[1] == (
        *("b_op", "narrow", "dstate 16", "32 channels"),
        ("float16", "bfloat16"),
        *(128, 1024, 90),
    )


def test_launched_counts_what_happens_within(stand_in):
    stand_in.launch(1, abi.FLOAT32)
    with kernels.launched() as found:
        stand_in.launch(1, abi.FLOAT32)
        stand_in.launch(1, abi.FLOAT32)
        stand_in.launch(0, abi.BFLOAT16)
        assert found == []
    stand_in.launch(2, abi.FLOAT32)
    assert [(one.kernel.id, one.dtype, one.launches) for one in found] == [
        ("b_op/narrow", "bfloat16", 1),
        ("b_op/any", "float32", 2),
    ]


def test_rows_that_no_test_ran_are_named(stand_in):
    lines = ["b_op/narrow float16\n", "b_op/narrow bfloat16\n", "b_op/any float32\n"]
    rows = kernels.kernels()
    assert list(reached.missed(rows, lines, True)) == ["a_op/any"]
    assert list(reached.missed(rows, lines, False)) == ["a_op/any for float32", "b_op/any for float16, bfloat16"]


def test_without_turns_kernels_off_and_on_again(stand_in):
    with kernels.without("b_op/narrow"):
        with kernels.without("b_op/narrow"):
            assert stand_in.enabled == [0, 1, 1]
        assert stand_in.enabled == [0, 1, 1]
    assert stand_in.enabled == [1, 1, 1]
    with pytest.raises(RuntimeError, match="from within"), kernels.without("b_op/narrow"):
        raise RuntimeError("from within")
    assert stand_in.enabled == [1, 1, 1]


def test_without_refuses_what_calls_need(stand_in):
    with pytest.raises(ValueError, match=r"no kernel 'b_op/wide'; `python -m mamba_ssm --kernels`"):
        kernels.without("b_op/wide").__enter__()
    with pytest.raises(ValueError, match="b_op/any takes any call"):
        kernels.without("b_op/narrow", "b_op/any").__enter__()
    assert stand_in.enabled == [1, 1, 1]


def test_command_prints_a_table_for_each_operator(stand_in, capsys, monkeypatch):
    from mamba_ssm._doctor import command

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert command.main(["--kernels"]) == 0
    out = capsys.readouterr().out
    assert "This GPU: A GPU, compute capability 8.6." in out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert ["narrow", "dstate 16", "32 channels", "fp16, bf16", "128", "1024", "9.0 only", "no"] in rows
    assert ["any", "nothing more", "64 channels", "fp32, fp16, bf16", "128", "1024", "7.5 and newer", "yes"] in rows
    assert out.index("## a_op") < out.index("## b_op")


@pytest.mark.skipif(loader.library_path("cuda").exists(), reason="this installation has CUDA kernels")
def test_an_installation_for_the_cpu_says_so(capsys):
    with pytest.raises(NativeError, match=r"CPU kernels only: .*does not exist"):
        kernels.kernels()
    run = run_script(__main__.__file__, "--kernels")
    assert run.returncode == 1 and "CPU kernels only" in run.stdout and run.stderr == ""


@pytest.fixture
def library(monkeypatch):
    """The CUDA library, which needs no GPU to say what it holds; the emulated one where that is named."""
    monkeypatch.setitem(loader.libraries, "cuda", cuda_library.functions_or_skip())


def test_rows_of_the_library_are_whole(library):
    found = kernels.kernels()
    assert len({kernel.id for kernel in found}) == len(found)
    by_op = {}
    for kernel in found:
        by_op.setdefault(kernel.op, []).append(kernel)
        assert kernel.shape and kernel.dtypes and kernel.architecture in (75, 80, 90), kernel
        assert 0 < kernel.threads <= 1024 and 0 <= kernel.shared_bytes <= 232448, kernel
    for op, rows in by_op.items():
        # Whatever the dtype and the GPU: some row takes any call. No row stands behind one that takes all of its calls.
        for dtype in kernels.DTYPES:
            general = [row for row in rows if not row.needs and dtype in row.dtypes]
            assert general and min(row.architecture for row in general) <= 80, f"{op} lacks a general row for {dtype}"
        seen = {}
        for row in rows:
            for dtype in row.dtypes:
                assert seen.get(dtype, 1000) > row.architecture, f"{row.id} is never reached for {dtype}"
            if not row.needs:
                seen.update(dict.fromkeys(row.dtypes, row.architecture))


def test_the_page_of_docs_shows_these_tables(library):
    assert kernels_page.PAGE.read_text(encoding="utf-8") == kernels_page.text(), "python scripts/kernels_page.py"


def test_the_library_refuses_what_it_does_not_have(library):
    functions = loader.load("cuda")
    count = functions["kernel_count"]()
    row = abi.MambaKernel()
    for index in (-1, count):
        assert functions["kernel"](index, row) == abi.ERROR_INVALID
        assert f"index must be in [0, {count}), got {index}" in functions["last_error"]().decode()
        assert functions["kernel_enable"](index, 0) == abi.ERROR_INVALID
        assert functions["kernel_launches"](index, abi.FLOAT32) == -1
    assert functions["kernel"](0, None) == abi.ERROR_INVALID
    assert functions["kernel_launches"](0, 3) == -1
    general = next(index for index, kernel in kernels._rows() if not kernel.needs)
    assert functions["kernel_enable"](general, 0) == abi.ERROR_INVALID
    assert "takes any call" in functions["last_error"]().decode()
