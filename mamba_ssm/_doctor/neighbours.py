"""What the doctor says of packages beside this one: of other projects' modules that have the names of ours."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from mamba_ssm._doctor.files import IS_CHECKOUT, SITE, Distribution, compare, find, installed, place
from mamba_ssm.version import __version__

_SCANS = tuple(f"selective_scan_cuda{kind}" for kind in ("", "_core", "_oflex", "_oflex_rh"))
_CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_cuda")
_ONE_CONVOLUTION = "Do `pip uninstall causal-conv1d` until none is left, and install the one that you want"


def examine(problems: list[str], notes: list[str]) -> dict[str, str]:
    """The facts for the report: whose causal_conv1d is installed."""
    _examine_scans(problems, notes)
    facts, more = _examine_convolution()
    problems += more
    return {"causal_conv1d": facts}


def _examine_scans(problems: list[str], notes: list[str]) -> None:
    distributions = installed("mamba_ssm")
    missing = [name for name in _SCANS if find(name) is None]
    if missing and IS_CHECKOUT:
        notes.append(f"{', '.join(missing)}: not on Python's path, since they are in this checkout's folder compat")
    elif missing and SITE not in (each.folder for each in distributions):  # there, RECORD tells of them
        problems.append(f"{', '.join(missing)} was not found, which this package brings: reinstall mamba_ssm")
    checkouts = [each.checkout / "compat" for each in distributions if each.checkout]
    notes += (
        f"{name} is {origin}, another project's: it is found before mamba_ssm's own, so that code which calls it does "
        "not use mamba_ssm's kernels. If that is not wanted, uninstall what brought it, or delete the file"
        for name, origin in _from_elsewhere(
            _SCANS, SITE, SITE / "compat", *checkouts, *(each.folder for each in distributions)
        )
    )


def _examine_convolution() -> tuple[str, list[str]]:
    """(which causal_conv1d this is, problems): this project's, another's, or both over each other."""
    found, module = installed("causal_conv1d"), find("causal_conv1d")
    origin = None
    if module is not None:  # without a file: a folder without __init__.py
        origin = module.origin or next(iter(module.submodule_search_locations or []), "built in")
    if not found:
        if origin is None:
            return "not installed", []
        if Path(origin).resolve().is_relative_to(SITE / "causal-conv1d"):
            return f"this checkout's: {origin}", []
        return f"of unknown origin: {origin}", [
            f"causal_conv1d is {origin}, which no installed package has brought. Remove it, or install the "
            "causal-conv1d that you want"
        ]
    problems = [problem for each in found for problem in _damage(each)]
    first = found[0]
    if len(found) > 1:
        problems.append(
            f"causal-conv1d is installed {len(found)} times: {' and '.join(map(str, found))}. {_ONE_CONVOLUTION}"
        )
    _, ours, of = first.version.partition("+mamba.")
    where = origin or f"{first.folder}, and Python does not find it"
    if len(found) == 1:
        # Of the other package, the second is compiled.
        names = _CONVOLUTIONS if ours else _CONVOLUTIONS[:1]
        folders = [first.folder, *([first.checkout] if first.checkout else [])]
        problems += (
            f"{name} is {elsewhere}, which is found before that of causal-conv1d {first.version}. {_ONE_CONVOLUTION}"
            for name, elsewhere in _from_elsewhere(names, *folders)
        )
    if not ours:
        return f"{first.version}, another project's: {where}", problems
    if of != __version__:
        problems.append(
            f"causal-conv1d {first.version} is a part of mamba_ssm {of}, and this is {__version__}: install the one "
            "that came with this"
        )
    return f"{first.version}, this project's: {where}", problems


def _damage(distribution: Distribution) -> Iterator[str]:
    try:
        differences = compare(distribution)
    except (OSError, ValueError, csv.Error) as error:
        yield f"causal-conv1d {distribution} cannot be compared with its RECORD: {error}. {_ONE_CONVOLUTION}"
        return
    if any(differences):
        yield f"causal-conv1d {distribution} is not as installed: {differences}. {_ONE_CONVOLUTION}"


def _from_elsewhere(names: Iterable[str], *folders: Path) -> Iterator[tuple[str, str]]:
    """(module, its file) of those that are not imported from Python files in these folders. There, a compiled module
    (.so, .pyd) comes before a Python file.
    """
    for name in names:
        spec = find(name)
        if spec is not None:
            origin = spec.origin or "a folder"
            ours = (folder / place for folder in folders for place in (f"{name}.py", f"{name}/__init__.py"))
            if place(origin) not in ours:
                yield name, origin
