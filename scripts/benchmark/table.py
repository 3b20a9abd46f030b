"""Tables of at most 120 columns: headings go over several lines, and below each table its columns are explained."""

import math
import textwrap

COLUMNS = 120

EXPLANATIONS = {
    # what is measured
    "case": "the problem's sizes: B batch, L length, D channels, N dstate, H heads, P headdim, d d_model; its dtype",
    "kernels": "best: this processor's best instruction set; avx2: as on a processor without AVX-512",
    "threads": "how many threads ours may use; 1: what counts is the processor's time of one thread",
    "load": "the machine's load average after the measurement; above the number of threads: others disturbed it",
    "parameters M": "millions of parameters",
    # times
    "fwd ms": "a forward call, median milliseconds",
    "bwd ms": "a backward call, median milliseconds",
    "fwd+bwd ms": "a forward and a backward call, median milliseconds",
    "fwd no grad ms": "a forward call under torch.no_grad()",
    "no grad us": "a forward call under torch.no_grad(), median microseconds",
    "fwd+bwd us": "a forward and a backward call, median microseconds",
    "call us": "a call from Python, the host's work and the GPU's, microseconds",
    "kernel us": "the same inside a CUDA graph: the kernel alone, microseconds",
    "one row, call us": "a call on one row, microseconds: what the host costs",
    "forward ms": "a forward call, median milliseconds",
    "train ms": "a forward and a backward call with the loss, median milliseconds",
    "generate ms": "generating 32 tokens, median milliseconds",
    "tokens/s": "tokens a second, all rows of the batch together",
    "tokens/s, CUDA graph": "the same with each step as one CUDA graph (generate's cg=True)",
    # against plain torch in the same run
    "plain fwd ms": "a forward call of the same in plain torch, at its fastest number of threads or chunk size",
    "plain fwd+bwd ms": "its forward and backward call",
    "fwd x": "times as fast as plain torch, forward (on a GPU: as upstream's figure of another day, not like for like)",
    "bwd x": "times as fast, backward",
    "fwd+bwd x": "times as fast, forward and backward",
    "forward x": "times as fast as the same model without this package, forward",
    "train x": "times as fast, forward and backward with the loss",
    "generate x": "times as fast, generating 32 tokens",
    # against upstream's stored figures
    "upstream fwd": "upstream's forward, milliseconds: another day, the GPU idle before each call, not like for like",
    "upstream bwd": "upstream's backward, likewise",
    "upstream fwd+bwd": "upstream's forward and backward, likewise",
    "upstream call us": "upstream's call from Python, likewise",
    "upstream kept MB": "what upstream keeps from forward to backward, reckoned from its source",
    # limits and goals
    "goal": "what the project asks for",
    "goal x": "what the project asks for",
    "goal us": "what the project asks for",
    "call goal us": "what the project asks for",
    "kernel goal us": "what the project asks for",
    "fwd+bwd goal us": "what the project asks for",
    "exp floor ms": "the least time that this GPU needs for the scan's exponentials alone",
    "fwd of copy": "share of the copy bandwidth that forward reaches, each tensor read or written once",
    "bwd of copy": "share of the copy bandwidth that backward reaches",
    "kernel of copy": "share of the copy bandwidth that the kernel reaches",
    # memory
    "kept MB": "what forward keeps for backward",
    "step peak MB": "the most that a forward and a backward need at once",
    "peak in (B,L,D)": "the same, in tensors of the layer's inner size",
}


def cell(value):
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _heading(column, width):
    """A heading's lines, of `width` or of its longest word."""
    return textwrap.wrap(column, max(width, *(len(word) for word in column.split())))


def table(title, rows):
    """The text of a table; rows are dicts of the same keys, each of them explained above."""
    columns = list(rows[0])
    cells = [[cell(row[column]) for column in columns] for row in rows]
    headings = [_heading(column, max(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    height = max(len(heading) for heading in headings)
    headings = [[""] * (height - len(heading)) + heading for heading in headings]
    lines = [*zip(*headings, strict=True), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = [title]
    for line in lines:
        padded = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(padded).rstrip())
    text.append("")
    indent = 2 + max(len(column) for column in columns) + 2
    for column in columns:
        text += textwrap.wrap(
            f"  {column.ljust(indent - 2)}{EXPLANATIONS[column]}", COLUMNS, subsequent_indent=" " * indent
        )
    return "\n".join(text)
