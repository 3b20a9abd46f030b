"""What the doctor says of packages beside this one, in a folder as pip leaves it."""

import base64
import hashlib
import json
import os

import pytest
from _helpers.copies import install, install_convolution, python, write_copy

from mamba_ssm import _doctor, _neighbours
from mamba_ssm.version import __version__

# Without torch, whose import takes long.
EXAMINE = """
import json, sys, types
for name in ("mamba_ssm", "mamba_ssm.version"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["mamba_ssm.version"].__version__ = VERSION
import runpy
print(json.dumps(runpy.run_path(FILE)["examine"]()))
"""


def examine(*folders, site=None):
    """(problems, notes) with these folders on the path; site: where this package is, if not in the first."""
    file = (site or folders[0]) / "mamba_ssm" / "_neighbours.py"
    code = EXAMINE.replace("VERSION", repr(__version__)).replace("FILE", repr(str(file)))
    return json.loads(python(folders, "-S", "-c", code))  # -S: no other mamba_ssm that is installed


def record(site, name, version, *files):
    """What pip writes beside the files of a distribution."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    digests = [base64.urlsafe_b64encode(hashlib.sha256(f.read_bytes()).digest()).rstrip(b"=").decode() for f in files]
    lines = [f"{f.relative_to(site).as_posix()},sha256={d},\n" for f, d in zip(files, digests, strict=True)]
    (info / "RECORD").write_text("".join(lines))


@pytest.fixture
def site(tmp_path):
    return install(tmp_path / "site")


@pytest.fixture
def both(site):
    """With this project's causal-conv1d."""
    install_convolution(site)
    record(site, "causal_conv1d", f"1.6.1+mamba.{__version__}", *(site / "causal_conv1d").glob("*.py"))
    return site


def test_the_doctor_says_it(monkeypatch):
    monkeypatch.setattr(_neighbours, "examine", lambda: (["a problem"], ["a note"]))
    report = _doctor.examine()
    assert "a problem" in report["problems"] and "a note" in report["notes"] and not report["healthy"]


def test_nothing_to_say(both):
    record(both, "mamba_ssm", f"{__version__}+cpu", *both.rglob("mamba_ssm/**/*.py"))
    assert examine(both) == [[], []]


def test_a_folder_by_another_path(both, tmp_path):
    """As lib64 of a virtual environment is a link to lib."""
    link, empty = tmp_path / "link", tmp_path / "empty"
    empty.mkdir()
    try:
        link.symlink_to(both, target_is_directory=True)
    except OSError:
        pytest.skip("no links here")
    assert examine(empty, link, site=both) == [[], []]


def test_a_library_beside_the_module_of_its_name_wins(site):
    library = site / "selective_scan_cuda_oflex.abi3.so"
    library.write_bytes(b"")
    problems, (note,) = examine(site)
    assert problems == []
    assert note.startswith(f"selective_scan_cuda_oflex is {library}, another project's: it is found before mamba_ssm's")


def test_a_module_that_is_missing(site):
    (site / "selective_scan_cuda.py").unlink()
    assert examine(site)[0] == ["selective_scan_cuda was not found, which this package brings: reinstall mamba_ssm"]


def test_a_copy_over_this_package(site):
    record(site, "mamba_ssm", f"{__version__}+cpu", *site.rglob("mamba_ssm/**/*.py"))
    write_copy(site)
    problems, (note,) = examine(site)
    assert problems == []
    files = ("__init__", "ops/__init__", "ops/selective_scan_interface")
    assert note.startswith(", ".join(f"mamba_ssm/{file}.py" for file in files) + ": not as installed")


# ---- causal-conv1d ---------------------------------------------------------------------------------------------------


def test_the_compiled_package(site):
    record(site, "causal_conv1d", "1.6.1")
    problems, (note,) = examine(site)
    assert problems == []
    assert note == "causal-conv1d 1.6.1 is a compiled package, not the one that calls mamba_ssm's kernels"


def test_the_compiled_package_over_ours(both):
    """Its files over ours, then its library alone beside ours."""
    ours = (both / "causal_conv1d" / "__init__.py").read_bytes()
    (both / "causal_conv1d" / "__init__.py").write_text("__version__ = '1.6.1'\n")
    (problem,), _ = examine(both)
    assert problem.startswith("causal_conv1d/__init__.py: not as installed with causal-conv1d 1.6.1+mamba.")
    assert "Do `pip uninstall causal-conv1d` until none is left" in problem
    (both / "causal_conv1d" / "__init__.py").write_bytes(ours)
    library = both / "causal_conv1d_cuda.abi3.so"
    library.write_bytes(b"")
    (problem,), _ = examine(both)
    assert problem.startswith(
        f"causal_conv1d_cuda is {library}, which is found before that of causal-conv1d 1.6.1+mamba"
    )


def test_ours_over_the_compiled_package(site):
    module = site / "causal_conv1d" / "__init__.py"
    module.parent.mkdir()
    module.write_text("__version__ = '1.6.1'\n")
    record(site, "causal_conv1d", "1.6.1", module)
    install_convolution(site)
    (problem,), _ = examine(site)
    assert problem.startswith("causal_conv1d/__init__.py: not as installed with causal-conv1d 1.6.1: another")


def test_two_in_two_folders(both, tmp_path):
    other = tmp_path / "other"
    record(other, "causal_conv1d", "1.5.2")
    problems, _ = examine(both, other)
    (problem,) = problems
    assert "causal-conv1d is installed more than once: 1.6.1+mamba." in problem
    assert f"{os.sep}site and 1.5.2 in {other}" in problem


def test_of_another_mamba_ssm(site):
    record(site, "causal_conv1d", "1.6.1+mamba.1.0.0")
    (problem,), _ = examine(site)
    assert problem.startswith(
        f"causal-conv1d 1.6.1+mamba.1.0.0 is a part of mamba_ssm 1.0.0, and this is {__version__}"
    )
