"""Tables of at most 120 columns: headings go over several lines, and below each table its columns are explained."""

import math
import textwrap

COLUMNS = 120

EXPLANATIONS = {
    # what is measured
    "case": "the problem's sizes: B batch, L length, D channels, N dstate, G groups, H heads, P headdim, d d_model; "
    "its dtype",
    "pass": "fwd forward, bwd backward, no grad: forward under torch.no_grad(); step: one of decoding or training; "
    "graph: as a CUDA graph; generate: greedy, prompt included",
    "kernels": "best: this processor's best instruction set; avx2: as on a processor without AVX-512",
    "threads": "how many threads ours may use; 1: what counts is the processor's time of one thread",
    "load": "the machine's load average after the measurement; above the number of threads: others disturbed it",
    # both sides in turns: medians
    "GPU ours ms": "the GPU's time alone, its queue kept full, milliseconds; of training steps: the time in which it "
    "was busy, by torch's profiler",
    "GPU peer ms": "the peer's, measured in the same run in turns with ours",
    "GPU one way ms": "that of our layer which sees its input from one end only, in the same run in turns",
    "GPU four copies ms": "that of our selective scan over four copies of the images, in the same run in turns",
    "GPU x": "peer (one way, four copies) / ours: times as fast; host-bound: the queue ran dry, so the GPU's time "
    "alone is not known",
    "call ours ms": "a call from an idle GPU to the end of its last kernel, the host's time included",
    "call peer ms": "the peer's",
    "call one way ms": "that of our layer which sees its input from one end only",
    "call four copies ms": "that of our selective scan over four copies of the images",
    "call x": "peer (one way, four copies) / ours: times as fast",
    "limit": "what limits the call on this machine: copy bandwidth, exponentials (exp) or tensor cores",
    "of limit": "share of that limit that ours reaches, each input read and each output written once",
    "ours tokens/s": "tokens a second, all rows of the batch together; of training steps: by call ours ms",
    "peer tokens/s": "the peer's",
    "x": "ours / peer",
    "kept ours MB": "what forward keeps for backward, megabytes",
    "kept peer MB": "the peer's",
    "kept ours / peer": "below 1: ours keeps less",
    "peak ours MB": "the most that a step needs at once beside parameters and inputs, megabytes; captured: what its "
    "graph reserved for itself",
    "peak peer MB": "the peer's",
    "peak ours / peer": "below 1: ours needs less",
    # beside llama.cpp: medians of wall-clock time, in turns
    "step x": "llama.cpp / ours, one token after a prompt of 512: times as fast",
    "step ms": "one token, all of the model, milliseconds",
    "llama.cpp step ms": "llama.cpp's",
    "prefill x": "the same of the prompt of 512 tokens",
    "prefill ms": "the prompt of 512 tokens, milliseconds",
    "llama.cpp prefill ms": "llama.cpp's",
    "batch of 8 x": "tokens a second of a batch of 8 / those of a batch of 1, both ours",
    "apart": "the greatest difference of both sides' logits, of the greatest logit",
    # one sequence on one device and over all
    "devices": "GPUs, or processes with a thread each",
    "one device ms": "a call with the whole sequence on one of them, from idle, median milliseconds",
    "all devices ms": "a call with a part of the sequence on each, until the slowest has ended",
    "devices x": "one device / all devices: times as fast",
    # against plain torch, or transformers without this package, in the same run
    "fwd ms": "a forward call, median milliseconds",
    "fwd+bwd ms": "a forward and a backward call, median milliseconds",
    "plain fwd ms": "a forward call of the same in plain torch, at its fastest number of threads or chunk size",
    "plain fwd+bwd ms": "its forward and backward call",
    "fwd x": "times as fast as plain torch, forward",
    "fwd+bwd x": "times as fast, forward and backward",
    "forward ms": "a forward call, median milliseconds",
    "train ms": "a forward and a backward call with the loss, median milliseconds",
    "generate ms": "generating 32 tokens, median milliseconds",
    "forward x": "times as fast as the same model without this package, forward",
    "train x": "times as fast, forward and backward with the loss",
    "generate x": "times as fast, generating 32 tokens",
    "forward convolution x": "times as fast as with this package but without causal_conv1d, forward",
    "train convolution x": "times as fast, forward and backward with the loss",
    "generate convolution x": "times as fast, generating 32 tokens",
}


def cell(value):
    """Three significant digits, which is more than a measurement holds."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return str(value)


def markdown(title, rows):
    """The same table in Markdown, below a heading."""
    lines = [
        list(rows[0]),
        ["---", *["--:"] * (len(rows[0]) - 1)],
        *([cell(value) for value in row.values()] for row in rows),
    ]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def explanations(columns):
    """What columns mean, as a list in Markdown."""
    return "\n".join(f"- {column}: {EXPLANATIONS[column]}" for column in columns)


def _heading(column, width):
    """A heading's lines, of `width` or of its longest word."""
    return textwrap.wrap(column, max(width, *(len(word) for word in column.split())))


def table(title, rows, explained=None):
    """The text of a table; rows are dicts of the same keys, each of them explained above.

    explained: a dict whose keys are the columns that need no explanation again, to which this table's are added.
    """
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
    explained = {} if explained is None else explained
    new = [column for column in columns if column not in explained]
    explained.update(dict.fromkeys(new))
    text += [""] if new else []
    indent = 2 + max((len(column) for column in new), default=0) + 2
    for column in new:
        text += textwrap.wrap(
            f"  {column.ljust(indent - 2)}{EXPLANATIONS[column]}", COLUMNS, subsequent_indent=" " * indent
        )
    return "\n".join(text)
