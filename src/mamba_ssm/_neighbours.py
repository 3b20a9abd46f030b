"""What the doctor says of packages beside this one: modules of other projects that have the names of ours."""

import hashlib
import importlib.metadata
import importlib.util
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

_SITE = Path(__file__).resolve().parents[1]  # the folder that the wheel was unpacked into
_MODULES = ("selective_scan_cuda", "selective_scan_cuda_core", "selective_scan_cuda_oflex")


def examine() -> tuple[list[str], list[str]]:
    """(problems, notes)."""
    problems = [
        f"{name} was not found, which this package brings: reinstall mamba_ssm"
        for name in _MODULES
        if importlib.util.find_spec(name) is None
    ]
    notes = [
        f"{name} is {origin}, another project's: it is found before mamba_ssm's own, so that code which calls it does "
        "not use mamba_ssm's kernels. If that is not wanted, uninstall what brought it, or delete the file"
        for name, origin in _foreign(_MODULES)
    ]
    changed = _changed("mamba_ssm")
    if changed:
        notes.append(
            f"{_listed(changed)}: not as installed. Was another mamba_ssm copied over this one? What is imported from "
            "there is the other's; it reaches this package's kernels by selective_scan_cuda"
        )
    return problems, notes


def _foreign(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(module, its file) of those that are imported from elsewhere than this package's folder; a library (.so, .pyd) in
    that folder comes before a Python file.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin not in (str(_SITE / f"{name}.py"), str(_SITE / name / "__init__.py")):
            yield name, spec.origin or "a folder"


def _changed(name: str) -> list[str]:
    """The Python files of an installed distribution that are not those which it was installed with. None of a checkout,
    nor of a distribution in another folder than this package's.
    """
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return []
    changed = []
    for file in files:
        path = Path(str(file.locate())).resolve()
        if file.suffix == ".py" and file.hash is not None and path.is_relative_to(_SITE):
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    return sorted(changed)


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(files[:3]) + more
