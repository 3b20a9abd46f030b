"""Draws a comparison: how many times as fast as upstream (the peer), or without a peer the share of the limit reached.

    python scripts/benchmark/plot.py docs/benchmarks.md docs/speed.svg

draws a page's tables with the columns section, case, pass, GPU ms, x, call ms, x.
"""

import argparse
from pathlib import Path

import comparison

# Each bar is the first case of a section that begins so; the tables hold all cases.
BARS = (
    ("scan", "B", "fwd", "Mamba scan, forward"),
    ("scan", "B", "bwd", "Mamba scan, backward"),
    ("ssd", "B", "fwd", "Mamba-2 scan, forward"),
    ("ssd", "B", "bwd", "Mamba-2 scan, backward"),
    ("conv", "B", "fwd", "Causal convolution, forward"),
    ("conv", "B", "bwd", "Causal convolution, backward"),
    ("norm", "add", "fwd", "Norm with residual, forward"),
    ("norm", "add", "bwd", "Norm with residual, backward"),
    ("block", "Mamba", "fwd+bwd", "Mamba layer, training step"),
    ("mamba2", "Mamba2", "fwd+bwd", "Mamba-2 layer, training step"),
    ("train", "Mamba1", "step", "Mamba language model, training step"),
    ("train", "Mamba2", "step", "Mamba-2 language model, training step"),
)
MODES = {"gpu": ("GPU time", "#2a6f97"), "call": ("wall-clock time", "#d9822b")}
HEADER = "| section | case | pass | GPU ms | x | call ms | x |"


def bars(lines):
    """[(words, mode, value)] of lines (section, case, pass, {mode: value}): the GPU's time, else the wall clock's."""
    found = []
    for section, beginning, which, words in BARS:
        wanted = ((section, which) == (name, kind) and case.startswith(beginning) for name, case, kind, _ in lines)
        values = next((line[-1] for line, is_wanted in zip(lines, wanted, strict=True) if is_wanted), {})
        found += [(words, mode, values[mode]) for mode in MODES if mode in values][:1]
    return found


def lines_of_results(sections, with_peer):
    """What a run measured, as bars takes it; a comparison with another layer of ours is no factor against the peer."""
    found = []
    for name, section in sections.items():
        for record in section.get("records", ()):
            if with_peer and record["beside"] != "peer":
                continue
            for which, measured in record["passes"].items():
                values = _ratios(measured) if with_peer else _share(record, which, measured)
                found.append((name, record["case"], which, values))
    return found


def lines_of_page(text):
    """A page's tables, as bars takes them."""
    found, inside = [], False
    for line in text.splitlines():
        inside = line == HEADER or (inside and line.startswith("|"))
        if inside and line != HEADER and not line.startswith("|-"):
            section, case, which, _, gpu, _, call = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((section, case, which, {mode: float(x) for mode, x in (("gpu", gpu), ("call", call)) if x}))
    return found


def _ratios(measured):
    found = {mode: comparison.ratio(measured[mode]) for mode in measured if mode in MODES}
    return {mode: value for mode, value in found.items() if isinstance(value, float)}


def _share(record, which, measured):
    share = comparison.share_of_limit(record, which, measured)
    return {"gpu" if {"gpu", "busy"} & measured.keys() else "call": share} if isinstance(share, float) else {}


def draw(path, lines, title, with_peer=True):
    """Write the picture; its format is the file name's ending. The background is its own, so any page can show it."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # text stays text; the same figures give the same file: no date, no random names
    style = {"font.size": 15, "svg.fonttype": "none", "svg.hashsalt": "mamba_ssm", "axes.spines.right": False}
    shown = bars(lines)
    with matplotlib.rc_context(style | {"axes.spines.top": False}):
        figure = Figure(figsize=(11, 1.8 + 0.42 * len(shown)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for mode, (label, color) in MODES.items():
            here = [(i, value) for i, (_, of, value) in enumerate(shown) if of == mode]
            if here:
                axes.bar_label(axes.barh(*zip(*here, strict=True), label=label, color=color), fmt="%.2f", padding=4)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_yticks(range(len(shown)), [words for words, _, _ in shown])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("times as fast as upstream" if with_peer else "share of the limit")
        figure.suptitle(title, fontsize=16)
        if len({mode for _, mode, _ in shown}) > 1:
            axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", help="to write; must end in .svg or .png")
    parser.add_argument("--title", default="How many times as fast as upstream, on one NVIDIA H200, in bfloat16")
    options = parser.parse_args()
    draw(options.picture, lines_of_page(options.page.read_text(encoding="utf-8")), options.title)


if __name__ == "__main__":
    main()
