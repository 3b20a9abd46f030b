"""The report: a dict of facts with the verdict, and its lines of text."""

import platform
import sys
import typing

from mamba_ssm._doctor import REINSTALL, files, neighbours
from mamba_ssm.version import __version__

Report = dict[str, typing.Any]
_LONGEST = 400  # characters of a line of text; JSON has them all


def examine() -> Report:
    """The whole report as a dict of plain values; report["healthy"] is the verdict."""
    problems: list[str] = []
    notes: list[str] = []
    report: Report = {
        "versions": {
            "mamba_ssm": __version__,
            "location": str(files.PACKAGE),
            "torch": None,
            "torch_cuda": None,
            "python": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "installation": files.examine(problems, notes),
        "beside": neighbours.examine(problems, notes),
        "build": {},
        "libraries": {},
        "driver": {},
        "gpus": [],
        "self_test": {},
    }
    try:
        from mamba_ssm._doctor import devices, libraries
    except Exception as error:  # a file that is missing, damaged or of another version
        problems.append(f"mamba_ssm cannot be imported: {type(error).__name__}: {error}. {REINSTALL}")
    else:
        libraries.examine(report, problems, notes)
        devices.examine(report, problems, notes)
    problems = list(dict.fromkeys(problems))  # a damaged build_info.json is met by each library
    report["problems"], report["notes"] = problems, notes
    report["healthy"] = not problems
    report["verdict"] = _verdict(report)
    return report


def _verdict(report: Report) -> str:
    tested = [device for device, results in report["self_test"].items() if all(r["ok"] for r in results.values())]
    if report["healthy"]:
        return f"healthy: mamba_ssm works on {', '.join(tested)}"
    works = f"works on {', '.join(tested)}; " if tested else ""
    count = len(report["problems"])
    return f"NOT healthy: {works}{count} problem{'s' if count > 1 else ''}: {report['problems'][0]}"


def render(report: Report) -> str:
    """The report as lines of text; the last one is the verdict."""
    versions, build, driver = report["versions"], report["build"], report["driver"]
    lines = [
        f"mamba_ssm   {versions['mamba_ssm']} ({versions['location']})",
        f"files       {report['installation']['is']}",
        f"beside      causal_conv1d: {report['beside']['causal_conv1d']}",
        f"python      {versions['python']} on {versions['platform']} ({versions['executable']})",
        f"torch       {versions['torch'] or 'none'} (CUDA: {versions['torch_cuda'] or 'none'})",
    ]
    if build:
        architectures = ", ".join(map(str, build.get("architectures") or [])) or "none"
        label, nvcc = build.get("local_label") or "none", build.get("nvcc_version") or "none"
        commit = str(build.get("source_commit") or "unknown")[:12] + (", changed" if build.get("source_dirty") else "")
        lines.append(f"build       label {label}, nvcc {nvcc}, architectures {architectures}, commit {commit}")
    else:
        lines.append("build       how it was built is not known: no build_info.json, or one that cannot be read")
    for kind, entry in report["libraries"].items():
        if entry["loaded"]:
            off = f", without {' and '.join(entry['dtypes_off'])}" if entry["dtypes_off"] else ""
            lines.append(f"library     mamba_{kind}: loaded ({entry['isa']}{off})")
        else:
            lines.append(
                f"library     mamba_{kind}: {'NOT loaded' if 'error' in entry else 'not in this installation'}"
            )
    if driver:
        lines.append(
            f"driver      {driver['version'] or 'unknown'}, supports CUDA: {driver['supports_cuda'] or 'no'}; "
            f"the wheel (CUDA {driver['wheel_cuda']}) needs driver {driver['needed'] or '?'}"
        )
    lines += [f"gpu         cuda:{gpu['index']} {gpu['name']} ({gpu['architecture']})" for gpu in report["gpus"]]
    lines += [f"self-test   {device}: {_outcome(results)}" for device, results in report["self_test"].items()]
    lines += [f"note        {note}" for note in report["notes"]]
    lines += [f"problem     {problem}" for problem in report["problems"]]
    lines.append(f"verdict     {report['verdict']}")
    return "\n".join(map(_one_line, lines))


def _outcome(results: dict[str, dict[str, typing.Any]]) -> str:
    good = [result["relative_error"] for result in results.values() if result["ok"]]
    if len(good) == len(results):
        return f"{len(good)} operators are right (relative error at most {max(good):.1e})"
    failed = ", ".join(name for name, result in results.items() if not result["ok"])
    return f"{len(good)} of {len(results)} operators are right; FAILED: {failed}"


def _one_line(text: str) -> str:
    label, rest = text[:12], " ".join(text[12:].split())
    if len(rest) > _LONGEST:
        rest = f"{rest[: _LONGEST - 155]} ... {rest[-150:]}"  # the cure comes last
    return label + rest
