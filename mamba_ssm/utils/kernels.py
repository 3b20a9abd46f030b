"""Which CUDA kernels this build has, which of them a call runs, and calls without some of them.

Each operator has a table of kernels in order of preference. A call runs the first one that takes it; the last row of a
table takes any call. docs/kernels.md shows the tables, csrc/OP/kernels.h is their source.
"""

import contextlib
import ctypes
import typing
from collections.abc import Iterator

from mamba_ssm._native import abi, launch, loader, signatures
from mamba_ssm._native.errors import NativeError
from mamba_ssm._torch import forget_plans, no_cuda_graphs

DTYPES = ("float32", "float16", "bfloat16")  # by code
_CODES = (abi.FLOAT32, abi.FLOAT16, abi.BFLOAT16)


class Kernel(typing.NamedTuple):
    """One kernel, or several that run as one."""

    op: str
    """the operator whose table it is in, such as "selective_scan_forward" """
    name: str
    """unique among those of its operator"""
    needs: str
    """what a call must have, in words; "" if it takes any call"""
    shape: str
    """what a block works on, in words"""
    dtypes: tuple[str, ...]
    """it is compiled for each of them"""
    threads: int
    """of a block, at most"""
    shared_bytes: int
    """dynamic shared memory of a block, at most"""
    architecture: int
    """the oldest compute capability that runs it, such as 80 for 8.0; 90 is 9.0a, and no other"""

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}"


class Launch(typing.NamedTuple):
    """How often a kernel was launched for a dtype."""

    kernel: Kernel
    dtype: str
    launches: int


def kernels() -> list[Kernel]:
    """All CUDA kernels of this build by operator, each operator's in order of preference. Needs no GPU.

    Raises:
        NativeError: this installation has no CUDA kernels, or they cannot be loaded.
    """
    return [kernel for _, kernel in _rows()]


def launches() -> list[Launch]:
    """What this process has launched so far, in all threads: kernels that were launched at least once.

    A CUDA graph counts when it is captured, not when it is replayed. After some steps of a training its layers are
    replayed, except within :func:`launched`. With torch.compile, a call counts as without.

    Raises:
        NativeError: as :func:`kernels`.
    """
    count = _library()["kernel_launches"]
    found = []
    for index, kernel in _rows():
        for dtype, code in zip(DTYPES, _CODES, strict=True):
            times = count(index, code)
            if times:
                found.append(Launch(kernel, dtype, times))
    return found


@contextlib.contextmanager
def launched() -> Iterator[list[Launch]]:
    """Within it, launches are counted: ``with launched() as found: model(x)``. The list is filled when the block ends.

    It counts what the whole process launches, as :func:`launches` does.

    Raises:
        NativeError: as :func:`kernels`.
    """
    found: list[Launch] = []
    before = {(one.kernel, one.dtype): one.launches for one in launches()}
    with no_cuda_graphs():
        yield found
    for one in launches():
        times = one.launches - before.get((one.kernel, one.dtype), 0)
        if times:
            found.append(one._replace(launches=times))


@contextlib.contextmanager
def without(*ids: str) -> Iterator[None]:
    """Within it, calls pass over these kernels ("OP/NAME") and run the next one of the table that takes them.

    To see what a kernel is worth, or whether it is the cause of a difference. For the whole process, all threads: none
    may be in a call while this begins or ends, since the size of its workspace depends on the kernel.

    Raises:
        ValueError: there is no such kernel, or it takes any call, so that some would have none without it.
        NativeError: as :func:`kernels`.
    """
    indices = {kernel.id: (index, kernel) for index, kernel in _rows()}
    for one in ids:
        if one not in indices:
            raise ValueError(f"there is no kernel {one!r}; `python -m mamba_ssm --kernels` lists them")
        if not indices[one][1].needs:
            raise ValueError(f"{one} takes any call: without it some calls would have no kernel")
    functions = _library()
    off = [indices[one][0] for one in ids]
    was_on = [index for index in off if _row(index).enabled]
    try:
        for index in was_on:
            launch.ask(functions, "kernel_enable", index, 0)
        forget_plans()  # which may have been made for the workspace of another kernel
        yield
    finally:
        for index in was_on:
            launch.ask(functions, "kernel_enable", index, 1)
        forget_plans()


def _library() -> signatures.Functions:
    if not loader.loaded("cuda") and not loader.library_path("cuda").exists():
        raise NativeError(
            f"this mamba_ssm holds CPU kernels only: {loader.library_path('cuda')} does not exist, so there "
            "is no table of CUDA kernels. Install a wheel with a CUDA label (+cu...)."
        )
    return loader.load("cuda")


def _rows() -> list[tuple[int, Kernel]]:
    """(index, kernel) by operator: libraries list their tables as they were linked."""
    functions = _library()
    rows = []
    for index in range(functions["kernel_count"]()):
        row = _row(index)
        dtypes = tuple(name for name, code in zip(DTYPES, _CODES, strict=True) if row.dtypes >> code & 1)
        op, name, needs, shape = (ctypes.string_at(text).decode() for text in (row.op, row.name, row.needs, row.shape))
        numbers = (row.threads, row.shared_bytes, row.architecture)
        rows.append((index, Kernel(op, name, needs, shape, dtypes, *numbers)))
    return sorted(rows, key=lambda one: one[1].op)  # stable: the order within an operator stays


def _row(index: int) -> abi.MambaKernel:
    row = abi.MambaKernel()
    launch.ask(_library(), "kernel", index, row)
    return row
