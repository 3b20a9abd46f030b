"""What the doctor says of packages beside this one: of other projects' modules that have the names of ours."""

import hashlib
import importlib.metadata
import importlib.util
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from mamba_ssm.version import __version__

_SITE = Path(__file__).resolve().parents[1]  # the folder that the wheel was unpacked into, or a checkout
_SCANS = ("selective_scan_cuda", "selective_scan_cuda_core", "selective_scan_cuda_oflex")
_CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_cuda")
_ONE_CONVOLUTION = "Do `pip uninstall causal-conv1d` until none is left, and install the one that you want"


def examine() -> tuple[list[str], list[str]]:
    """(problems, notes)."""
    problems = [
        f"{name} was not found, which this package brings: reinstall mamba_ssm"
        for name in _SCANS
        if importlib.util.find_spec(name) is None
    ]
    notes = [
        f"{name} is {origin}, another project's: it is found before mamba_ssm's own, so that code which calls it does "
        "not use mamba_ssm's kernels. If that is not wanted, uninstall what brought it, or delete the file"
        for name, origin in _from_elsewhere(
            _SCANS, _SITE, _SITE / "compat", *(_folder(each) for each in _distributions("mamba_ssm"))
        )
    ]
    for distribution in _distributions("mamba_ssm"):
        changed = _changed(distribution) if _folder(distribution) == _SITE else []
        if changed:
            notes.append(
                f"{_listed(changed)}: not as installed. Was another mamba_ssm copied over this one? What is imported "
                "from there is the other's; it reaches this package's kernels by selective_scan_cuda"
            )
    problems += _examine_convolution(notes)
    return problems, notes


def _examine_convolution(notes: list[str]) -> Iterator[str]:
    """Problems of the distribution causal-conv1d: this project's, another's, or both over each other."""
    found = _distributions("causal-conv1d")
    for distribution in found:
        changed = _changed(distribution)
        if changed:
            yield (
                f"{_listed(changed)}: not as installed with causal-conv1d {distribution.version}: another one lies "
                f"over it. {_ONE_CONVOLUTION}"
            )
    if len(found) > 1:
        places = " and ".join(f"{each.version} in {_folder(each)}" for each in found)
        yield f"causal-conv1d is installed more than once: {places}. {_ONE_CONVOLUTION}"
    elif found:
        version, folder = found[0].version, _folder(found[0])
        _, ours, of = version.partition("+mamba.")
        if not ours:
            notes.append(f"causal-conv1d {version} is a compiled package, not the one that calls mamba_ssm's kernels")
            return
        if of != __version__:
            yield (
                f"causal-conv1d {version} is a part of mamba_ssm {of}, and this is {__version__}: install the one that "
                "came with this"
            )
        for name, origin in _from_elsewhere(_CONVOLUTIONS, folder):
            yield f"{name} is {origin}, which is found before that of causal-conv1d {version}. {_ONE_CONVOLUTION}"


def _distributions(name: str) -> list[Distribution]:
    """The installed distributions of this name, each folder's once."""
    return list({_folder(each): each for each in importlib.metadata.distributions(name=name)}.values())


def _folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file(""))).resolve()


def _from_elsewhere(names: Iterable[str], *folders: Path) -> Iterator[tuple[str, str]]:
    """(module, its file) of those that are not imported from Python files in these folders. There, a compiled module
    (.so, .pyd) comes before a Python file.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            origin = spec.origin or "a folder"
            ours = (folder / place for folder in folders for place in (f"{name}.py", f"{name}/__init__.py"))
            if Path(origin).resolve() not in ours:
                yield name, origin


def _changed(distribution: Distribution) -> list[str]:
    """The Python files that are not those which were installed. None of a checkout."""
    changed = []
    for file in distribution.files or []:
        if file.suffix == ".py" and file.hash is not None:
            path = Path(str(file.locate()))
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    return sorted(changed)


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(files[:3]) + more
