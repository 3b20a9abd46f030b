"""`python -m mamba_ssm --kernels`: the tables of CUDA kernels, in Markdown."""

import itertools
import operator
import typing

from mamba_ssm._doctor import devices, files

if typing.TYPE_CHECKING:
    from types import ModuleType

    from mamba_ssm.utils.kernels import Kernel

HEADINGS = ("kernel", "a call needs", "a block works on", "dtypes", "threads", "shared bytes", "GPU")


def render() -> tuple[str, bool]:
    """(the tables, or why there are none; whether there are any)."""
    problems: list[str] = []
    torch = devices.import_all({"versions": {}}, problems)
    if torch is None:
        return problems[0], False
    from mamba_ssm.utils import kernels

    try:
        rows = kernels.kernels()
    except Exception as error:  # no CUDA library, or one that does not load
        return str(error), False
    gpu = _gpu(torch)
    parts = [f"CUDA kernels of {files.PACKAGE}, by operator: a call runs the first one that takes it."]
    if gpu is not None:
        parts.append(f"This GPU: {gpu[0]}, compute capability {gpu[1]}.{gpu[2]}.")
    return "\n\n".join([*parts, tables(rows, gpu[1] if gpu else None)]), True


def tables(rows: "list[Kernel]", major: int | None) -> str:
    """A heading and a table for each operator. major: compute capability of a GPU, for a column "runs here"."""
    parts = []
    for op, group in itertools.groupby(rows, key=operator.attrgetter("op")):
        cells: list[tuple[str, ...]] = [HEADINGS if major is None else (*HEADINGS, "runs here")]
        for row in group:
            needs = row.needs or "nothing more"
            cells.append((row.name, needs, row.shape, _short(row.dtypes), str(row.threads), str(row.shared_bytes)))
            cells[-1] += (_gpus(row.architecture),)
            if major is not None:
                cells[-1] += ("yes" if _runs_on(row.architecture, major) else "no",)
        parts.append(f"## {op}\n\n{_table(cells)}")
    return "\n\n".join(parts)


def _gpu(torch: "ModuleType") -> "tuple[str, int, int] | None":
    """(name, major, minor) of the current CUDA device."""
    if not torch.cuda.is_available():
        return None
    return (torch.cuda.get_device_name(), *torch.cuda.get_device_capability())


def _runs_on(architecture: int, major: int) -> bool:
    return major == 9 if architecture == 90 else major >= architecture // 10


def _gpus(architecture: int) -> str:
    return "9.0 only" if architecture == 90 else f"{architecture / 10} and newer"


def _short(dtypes: "tuple[str, ...]") -> str:
    return ", ".join(name.replace("bfloat", "bf").replace("float", "fp") for name in dtypes)


def _table(cells: list[tuple[str, ...]]) -> str:
    """Rows of texts as a Markdown table whose columns are aligned; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
