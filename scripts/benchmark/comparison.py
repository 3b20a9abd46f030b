"""Measures a section: each case on both sides in turns, and what that says as rows of tables."""

import dataclasses
import statistics

from sides import Failed

ROUNDS, REPEATS = 4, 5  # the sides take turns ROUNDS times, with REPEATS calls each
QUICK = 1, 3


def measure(sides, case, device, quick=False):
    """{"case", "passes": {pass: {mode: {side: measured}}}, "failed": {side: why}}; measured: seconds, or megabytes.

    A side that fails is not asked again for this case; without ours the case is over.
    """
    found = {"case": case.name, "passes": {}, "failed": {}}
    asked = {side.name: side for side in sides.all}

    def attempt(name, step, act):
        """What act(side) returns; a side that fails is out."""
        try:
            return act(asked[name])
        except Failed as error:
            found["failed"][name] = f"{step}: {error}"
            del asked[name]
            return None

    def answers(step, command, names, **arguments):
        """{name: answer} of the sides that have one; where they are asked together they work at the same time."""
        replies = {}
        for together in names:
            for name in [name for name in together if name in asked]:
                attempt(name, step, lambda side: side.send(command, **arguments))
            for name in [name for name in together if name in asked]:
                replies[name] = attempt(name, step, lambda side: side.receive(f"{case.name}: {side.name}, {step}"))
        return {name: reply for name, reply in replies.items() if reply is not None}

    everyone, in_turns = [[side.name for side in sides.all]], [[side.name] for side in sides.all]
    fields = {"kind": type(case).__name__, "fields": dataclasses.asdict(case)}
    answers("comparing with float64", "prepare", everyone, **fields)
    rounds, repeats = QUICK if quick else (ROUNDS, REPEATS)
    for which, mode in case.measurements(device):
        turns = []
        for turn in range(1 if mode == "memory" else rounds):
            if "ours" not in asked:
                return found
            step = f"{which}, {mode} ({turn + 1} of {rounds})"
            turns.append(answers(step, "measure", in_turns, which=which, mode=mode, repeats=repeats))
        merged = {name: _merged([turn[name] for turn in turns]) for name in turns[0] if name in asked}
        found["passes"].setdefault(which, {})[mode] = merged
    return found


def _merged(turns):
    """The median over all turns; dry if the GPU waited for the host in any."""
    if "seconds" not in turns[0]:
        return turns[0]
    seconds = statistics.median(seconds for turn in turns for seconds in turn["seconds"])
    return {"seconds": seconds, "dry": any(turn["dry"] for turn in turns)}


def limits(case, ceilings):
    """{pass: {"seconds", "by"}}: the least time that this machine needs for a case's work, and what limits it."""
    found = {}
    for which in case.passes:
        work = case.work(which)
        if work is None or {"memory", "tokens"} & set(case.modes(which, "cuda")):
            continue
        needs = {"copy": work.bytes, "exp": work.exponentials, "tensor": work.flops}
        times = {by: need / ceilings[by] for by, need in needs.items() if need and by in ceilings}
        if times:
            by = max(times, key=times.get)
            found[which] = {"seconds": times[by], "by": by}
    return found


# ---- rows of tables --------------------------------------------------------------------------------------------------


def tables(name, records, device, with_peer):
    """[(title, rows)] of a section's records: times, tokens a second, memory; those that have rows."""
    kinds = [
        (name, _time_rows, ("gpu", "call")),
        (f"{name}: tokens a second", _token_rows, ("tokens",)),
        (f"{name}: memory of a training step", _memory_rows, ("memory",)),
    ]
    found = []
    for title, make, modes in kinds:
        rows = []
        for record in records:
            for which, measured in record["passes"].items():
                if any(mode in measured for mode in modes) and any(measured.values()):
                    rows.append({"case": record["case"], **make(record, which, measured, device, with_peer)})
        if rows:
            found.append((title, rows))
    return found


def ratio(measured):
    """peer / ours, "host-bound" where the GPU waited for the host on either side, None where one is missing."""
    if "ours" not in measured or "peer" not in measured:
        return None
    if measured["ours"]["dry"] or measured["peer"]["dry"]:
        return "host-bound"
    return measured["peer"]["seconds"] / measured["ours"]["seconds"]


def share_of_limit(record, which, measured):
    """The least possible time / ours, "host-bound" where the GPU waited for the host, None where there is no limit."""
    limit, own = record["limits"].get(which), measured.get("gpu", measured.get("call", {})).get("ours")
    if not limit or not own:
        return None
    return "host-bound" if own["dry"] else limit["seconds"] / own["seconds"]


def _time_rows(record, which, measured, device, with_peer):
    row = {"pass": which}
    for mode, title in (("gpu", "GPU"), ("call", "call")):
        if mode == "gpu" and device == "cpu":
            continue
        for side in ("ours", "peer")[: 1 + with_peer]:
            row[f"{title} {side} ms"] = _scaled(measured.get(mode, {}), side, "seconds", 1e3)
        if with_peer:
            row[f"{title} x"] = ratio(measured.get(mode, {}))
    limit = record["limits"].get(which)
    if device == "cuda":
        row["limit"] = limit["by"] if limit else None
        row["of limit"] = share_of_limit(record, which, measured)
    return row


def _token_rows(record, which, measured, device, with_peer):
    tokens = measured["tokens"]
    row = {"pass": which}
    for side in ("ours", "peer")[: 1 + with_peer]:
        row[f"{side} tokens/s"] = record["tokens"] / tokens[side]["seconds"] if side in tokens else None
    return row | ({"x": ratio(tokens)} if with_peer else {})


def _memory_rows(record, which, measured, device, with_peer):
    memory, row = measured["memory"], {}
    for what in ("kept", "peak"):
        for side in ("ours", "peer")[: 1 + with_peer]:
            row[f"{what} ours MB" if side == "ours" else f"{what} peer MB"] = _scaled(memory, side, what, 1.0)
        if with_peer:
            both = "ours" in memory and "peer" in memory
            row[f"{what} ours / peer"] = memory["ours"][what] / memory["peer"][what] if both else None
    return row


def _scaled(measured, side, what, scale):
    return measured[side][what] * scale if side in measured else None


def section(sides, cases, device, ceilings, quick=False):
    """Records of all cases, or of the first one where it must be quick."""
    records = []
    for case in cases[:1] if quick else cases:
        record = measure(sides, case, device, quick)
        record["limits"] = limits(case, ceilings)
        record["tokens"] = case.tokens
        records.append(record)
    return records
