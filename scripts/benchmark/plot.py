"""Draws a comparison: how many times as fast as the peer each line is, or without a peer its share of the limit."""

import comparison

MODES = {"gpu": ("GPU: its time alone", "#2a6f97"), "call": ("call: the host's time too", "#f4a259")}
INCHES_A_LINE = 0.32
CASES = 2  # of each section are drawn: the tables hold all


def lines(sections, with_peer):
    """[(label, {mode: value})] of the lines that have a value, of each section's first cases, in the tables' order."""
    found = []
    for name, section in sections.items():
        for record in section.get("records", ())[:CASES]:
            if with_peer and record["beside"] != "peer":
                continue  # how it compares with another layer of ours is no factor against the peer
            for which, measured in record["passes"].items():
                values = _ratios(measured) if with_peer else _share(record, which, measured)
                if values:
                    found.append((f"{name}: {record['case']}, {which}", values))
    return found


def _ratios(measured):
    found = {mode: comparison.ratio(measured[mode]) for mode in measured if mode in ("gpu", "call")}
    if "tokens" in measured:
        found["call"] = comparison.ratio(measured["tokens"])
    return {mode: value for mode, value in found.items() if isinstance(value, float)}


def _share(record, which, measured):
    share = comparison.share_of_limit(record, which, measured)
    return {"gpu" if "gpu" in measured else "call": share} if isinstance(share, float) else {}


def draw(path, sections, with_peer, title):
    """Write the picture; its format is the file name's ending."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = lines(sections, with_peer)
    figure = Figure(figsize=(11, 1.5 + INCHES_A_LINE * max(1, len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for mode, (label, color) in MODES.items():
        offset = -0.2 if mode == "gpu" else 0.2
        here = [(i + offset, values[mode]) for i, (_, values) in enumerate(shown) if mode in values]
        if here:
            bars = axes.barh(*zip(*here, strict=True), height=0.38, label=label, color=color)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [label for label, _ in shown], fontsize=8)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)
    axes.set_xlabel("times as fast as the peer" if with_peer else "share of the limit")
    axes.set_title(title, fontsize=9, loc="left", pad=24)
    if shown:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=len(MODES), fontsize=8, frameon=False)
    # the same figures give the same file: no date, no random names
    with matplotlib.rc_context({"svg.hashsalt": "mamba_ssm"}):
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
