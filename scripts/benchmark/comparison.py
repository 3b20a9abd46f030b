"""Measures a section: each case on both sides in turns, and what that says as rows of tables."""

import dataclasses
import statistics

from sides import Failed

ROUNDS, REPEATS = 4, 5  # the sides take turns ROUNDS times, with REPEATS calls each
QUICK = 1, 3


def measure(sides, case, device, quick=False):
    """{"case", "passes": {pass: {mode: {side: measured}}}, "kernels": {pass: ids}, "failed": {side: why}}.

    measured: seconds, or megabytes. kernels: of ours, on CUDA.

    A side that fails is not asked again for this case; without ours the case is over.
    """
    found = {"case": case.name, "beside": case.beside, "passes": {}, "kernels": {}, "failed": {}}
    measured = {name: own for name, (_, own) in sides.of(case).items()}
    asked = {name: side for name, (side, _) in sides.of(case).items()}

    def attempt(name, step, act):
        """What act(side) returns; a side that fails is out."""
        try:
            return act(asked[name])
        except Failed as error:
            found["failed"][name] = f"{step}: {error}"
            del asked[name]
            return None

    def answers(step, command, names, arguments):
        """{name: answer} of the sides that have one; where they are asked together they work at the same time.

        arguments: of a name.
        """
        replies = {}
        for together in names:
            for name in [name for name in together if name in asked]:
                attempt(name, step, lambda side: side.send(command, **arguments(side.name)))
            for name in [name for name in together if name in asked]:
                replies[name] = attempt(name, step, lambda side: side.receive(f"{case.name}: {side.name}, {step}"))
        return {name: reply for name, reply in replies.items() if reply is not None}

    def described(name):
        kind = type(measured[name])
        return {"kind": [kind.__module__, kind.__name__], "fields": dataclasses.asdict(measured[name])}

    answers("comparing with float64", "prepare", [list(measured)], described)
    if device == "cuda":
        for which in dict.fromkeys(which for which, mode in case.measurements(device) if mode != "memory"):
            for reply in answers(
                f"{which}, its kernels", "kernels", [["ours"]], lambda name, which=which: {"which": which}
            ).values():
                found["kernels"][which] = reply["kernels"]
    rounds, repeats = QUICK if quick else (ROUNDS, REPEATS)
    for which, mode in case.measurements(device):
        turns = []
        for turn in range(1 if mode == "memory" else rounds):
            if "ours" not in asked:
                return found
            step = f"{which}, {mode} ({turn + 1} of {rounds})"
            what = {"which": which, "mode": mode, "repeats": repeats}
            turns.append(answers(step, "measure", [[name] for name in measured], lambda name, what=what: what))
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
    beside = records[0]["beside"]  # the same for all cases of a section
    sides = ["ours", beside] if with_peer or beside != "peer" else ["ours"]
    kinds = [
        (name, _time_rows, ("gpu", "busy", "call")),
        (f"{name}: tokens a second", _token_rows, ("tokens",)),
        (f"{name}: memory of a training step", _memory_rows, ("memory",)),
    ]
    found = []
    for title, make, modes in kinds:
        rows = []
        for record in records:
            for which, measured in record["passes"].items():
                if any(mode in measured for mode in modes) and any(measured.values()):
                    rows.append({"case": record["case"], **make(record, which, measured, device, sides)})
        if rows:
            found.append((title, rows))
    return found


def ratio(measured, beside="peer"):
    """beside / ours, "host-bound" where the GPU waited for the host on either side, None where one is missing."""
    if "ours" not in measured or beside not in measured:
        return None
    if measured["ours"]["dry"] or measured[beside]["dry"]:
        return "host-bound"
    return measured[beside]["seconds"] / measured["ours"]["seconds"]


def share_of_limit(record, which, measured):
    """The least possible time / ours, "host-bound" where the GPU waited for the host, None where there is no limit."""
    limit = record["limits"].get(which)
    own = next((measured[mode] for mode in ("gpu", "busy", "call") if mode in measured), {}).get("ours")
    if not limit or not own:
        return None
    return "host-bound" if own["dry"] else limit["seconds"] / own["seconds"]


def _time_rows(record, which, measured, device, sides):
    row = {"pass": which}
    for mode, title in (("gpu", "GPU"), ("call", "call")):
        if mode == "gpu" and device == "cpu":
            continue
        times = measured.get(mode, measured.get("busy", {}) if mode == "gpu" else {})
        for side in sides:
            row[f"{title} {side} ms"] = _scaled(times, side, "seconds", 1e3)
        for beside in sides[1:]:
            row[f"{title} x"] = ratio(times, beside)
    if record.get("tokens of a step"):
        for side in sides:
            seconds = _scaled(measured.get("call", {}), side, "seconds", 1.0)
            row[f"{side} tokens/s"] = seconds and record["tokens of a step"] / seconds
    limit = record["limits"].get(which)
    if device == "cuda":
        row["limit"] = limit["by"] if limit else None
        row["of limit"] = share_of_limit(record, which, measured)
    return row


def _token_rows(record, which, measured, device, sides):
    tokens = measured["tokens"]
    row = {"pass": which}
    for side in sides:
        row[f"{side} tokens/s"] = record["tokens"] / tokens[side]["seconds"] if side in tokens else None
    for beside in sides[1:]:
        row["x"] = ratio(tokens, beside)
    return row


def _memory_rows(record, which, measured, device, sides):
    memory, row = measured["memory"], {}
    for what in ("kept", "peak"):
        for side in sides:
            row[f"{what} {side} MB"] = _scaled(memory, side, what, 1.0)
        for beside in sides[1:]:
            ours, theirs = (memory.get(side, {}).get(what) for side in ("ours", beside))
            row[f"{what} ours / {beside}"] = ours / theirs if ours and theirs else None
    return row


def _scaled(measured, side, what, scale):
    found = measured.get(side, {}).get(what)
    return None if found is None else found * scale


def kernels(records):
    """Lines that tell which of this package's CUDA kernels each line of a section's tables runs."""
    return [
        f"{record['case']} {which}: {', '.join(ids)}"
        for record in records
        for which, ids in record["kernels"].items()
        if ids
    ]


def section(sides, cases, device, ceilings, quick=False):
    """A record of each case, or of the first one where it must be quick, as soon as it is measured."""
    for case in cases[:1] if quick else cases:
        record = measure(sides, case, device, quick)
        record["limits"] = limits(case, ceilings)
        record["tokens"], record["tokens of a step"] = case.tokens, case.tokens_of_step
        yield record
