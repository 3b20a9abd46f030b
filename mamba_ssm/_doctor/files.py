"""Which installation this is, and whether its files are those that were installed."""

import csv
import hashlib
import json
import os
import re
import sys
import typing
from base64 import urlsafe_b64encode
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse
from urllib.request import url2pathname

from mamba_ssm._doctor import REINSTALL


def place(file: str) -> Path:
    """The file's path without links to folders. A file may be a link itself: uv can install so."""
    return Path(file).parent.resolve() / Path(file).name


PACKAGE = place(__file__).parents[1]
SITE = PACKAGE.parent  # the folder that the wheel was unpacked into, or a checkout
IS_CHECKOUT = (SITE / "setup.py").is_file() and (SITE / "csrc").is_dir()


class Distribution(typing.NamedTuple):
    """An installed distribution: a wheel, or an editable install."""

    version: str
    info: Path  # its .dist-info, or what older programs leave, an .egg-info

    @property
    def folder(self) -> Path:
        return self.info.parent

    @property
    def checkout(self) -> Path | None:
        """The source tree of an editable install, else None."""
        try:
            source = json.loads((self.info / "direct_url.json").read_text(encoding="utf-8"))
            if source.get("dir_info", {}).get("editable"):
                return Path(url2pathname(urlparse(source["url"]).path)).resolve()
        except (OSError, ValueError, KeyError, AttributeError):
            pass  # of an index or a file; or pip's own business
        return None

    def __str__(self) -> str:
        return f"{self.version} in {self.folder}"


class Differences(typing.NamedTuple):
    """Files, by their names in RECORD, which are not as they were installed."""

    changed: list[str]
    missing: list[str]
    added: list[str]

    def __str__(self) -> str:
        kinds = (("changed", self.changed), ("missing", self.missing), ("not of it", self.added))
        return "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds if names)


def installed(project: str) -> list[Distribution]:
    """This project's distributions on Python's path, in its order. `project`: the name with underscores."""
    found = {}
    for folder in map(Path, sys.path):  # "" is where Python was started
        try:
            infos = [path for path in folder.iterdir() if path.suffix in (".dist-info", ".egg-info")]
        except OSError:
            continue
        for info in sorted(infos):
            name, version = re.fullmatch(r"(.+?)(?:-(\d[^-]*).*)?", info.stem).groups()  # type: ignore[union-attr]
            info = place(str(info))
            built_here = IS_CHECKOUT and info.suffix == ".egg-info" and SITE in info.parents
            if re.sub(r"[-_.]+", "_", name).lower() == project and not built_here:
                found[info] = Distribution(version or "of unknown version", info)
    return list(found.values())


def find(module: str) -> ModuleSpec | None:
    """Where `import module` in a new Python would find it, whatever was imported in this one."""
    specs = (finder.find_spec(module, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def compare(distribution: Distribution) -> Differences:
    """What was installed, by RECORD, and what is there. Bytecode aside. Raises OSError or ValueError: no RECORD."""
    with (distribution.info / "RECORD").open(encoding="utf-8", newline="") as file:
        rows = [(row[0].replace("\\", "/"), *row[1:3]) for row in csv.reader(file) if row]
    changed, missing, known = [], [], set()
    for row in rows:
        if len(row) != 3:
            raise ValueError(f"{row[0][:80]!r} is no line of a RECORD")
        name, digest, size = row
        path = distribution.folder / name
        known.add(_key(path))
        if _is_bytecode(name) or not digest:
            continue
        if not path.is_file():
            missing.append(name)
        elif not _is_as_recorded(path, digest, size):
            changed.append(name)
    packages = {name.split("/")[0] for name, *_ in rows if re.fullmatch(r"[^/.]+/__init__\.py", name)}
    there = (path for package in packages for path in (distribution.folder / package).rglob("*") if path.is_file())
    names = ((path, path.relative_to(distribution.folder).as_posix()) for path in there)
    added = [name for path, name in names if not _is_bytecode(name) and _key(path) not in known]
    return Differences(sorted(changed), sorted(missing), sorted(added))


def _key(path: Path) -> str:
    """The same for all spellings of a path, on Windows in capital letters too."""
    return os.path.normcase(os.path.normpath(path))


def _is_bytecode(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix == ".pyc" or "__pycache__" in path.parts


def _is_as_recorded(path: Path, digest: str, size: str) -> bool:
    mode, _, expected = digest.partition("=")
    try:
        if size and path.stat().st_size != int(size):
            return False
        found = hashlib.new(mode, path.read_bytes()).digest()
    except (OSError, ValueError):  # not readable; no algorithm of this name
        return False
    return urlsafe_b64encode(found).rstrip(b"=").decode() == expected


def listed(names: list[str]) -> str:
    """The first three, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# ---- mamba_ssm -------------------------------------------------------------------------------------------------------


def examine(problems: list[str], notes: list[str]) -> dict[str, typing.Any]:
    """The facts for the report."""
    distributions = installed("mamba_ssm")
    kind, what = _kind(distributions)
    facts: dict[str, typing.Any] = {"kind": kind, "is": what, "distributions": [str(each) for each in distributions]}
    if kind == "copy":
        notes.append(f"{SITE} holds no metadata of mamba_ssm: its files could not be compared with those of a wheel")
    elif kind == "checkout" and distributions:
        notes.append(
            f"mamba_ssm {distributions[0]} is installed too. Python started in {SITE} imports this checkout instead"
        )
    if len(distributions) > 1:
        places = " and ".join(map(str, distributions))
        problems.append(
            f"mamba_ssm is installed {len(distributions)} times: {places}. Do `pip uninstall mamba_ssm` until none is "
            "left, and install the one that you want"
        )
    found = find("mamba_ssm")
    origin = place(found.origin) if found and found.origin else None
    if origin != PACKAGE / "__init__.py" and (PACKAGE / "__init__.py").is_file():
        problems.append(
            f"`import mamba_ssm` takes {origin or 'a folder'}, another mamba_ssm, which comes first on Python's path. "
            f"This one is {PACKAGE}. Rename or remove the other, or start Python in another folder"
        )
    facts.update(_compare_all(distributions, problems))
    return facts


def _kind(distributions: list[Distribution]) -> tuple[str, str]:
    """(one word, the words of the report)."""
    for each in distributions:
        if each.folder == SITE:
            return "wheel", f"a wheel of mamba_ssm {each.version}, installed in {SITE}"
        if IS_CHECKOUT and each.checkout == SITE:
            return "editable", f"the checkout {SITE}, installed as editable ({each.version})"
    if IS_CHECKOUT:
        return "checkout", f"the checkout {SITE}, which is not installed"
    return "copy", f"a copy in {SITE}"


def _compare_all(distributions: list[Distribution], problems: list[str]) -> dict[str, list[str]]:
    """Each folder's files with its RECORD; of two in one folder with the one that they fit best."""
    facts: dict[str, list[str]] = {"changed": [], "missing": [], "added": []}
    best: dict[Path, tuple[int, Distribution, Differences]] = {}
    for each in distributions:
        try:
            differences = compare(each)
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"the files of mamba_ssm {each} cannot be compared with its RECORD: {error}. {REINSTALL}")
            continue
        count = sum(map(len, differences))
        if each.folder not in best or count < best[each.folder][0]:
            best[each.folder] = count, each, differences
    for count, each, differences in best.values():
        if count:
            files = "file is" if count == 1 else "files are"
            problems.append(
                f"{count} {files} not as installed with mamba_ssm {each}: {differences}. Was another mamba_ssm copied "
                f"over it? {REINSTALL}"
            )
        for kind, names in differences._asdict().items():
            facts[kind] += [str(each.folder / name) for name in names]
    return facts
