"""What the doctor says of packages beside this one, in a folder as pip leaves it."""

import json
import os

import pytest
from _helpers.copies import files_of, install, install_convolution, python, record, write_copy

from mamba_ssm.version import __version__

EXAMINE = """
import json, sys, types
package = sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")  # without torch, whose import takes long
package.__path__ = [FOLDER]
from mamba_ssm._doctor import files, neighbours
found, problems, notes = {}, [], []
found.update(files.examine(problems, notes))
found.update(neighbours.examine(problems, notes))
print(json.dumps([problems, notes, found["causal_conv1d"]]))
"""


def examine(*folders, site=None):
    """(problems, notes) with these folders on the path; site: where this package is, if not in the first."""
    return report(*folders, site=site)[:2]


def report(*folders, site=None):
    """(problems, notes, whose causal_conv1d it is)"""
    code = EXAMINE.replace("FOLDER", repr(str((site or folders[0]) / "mamba_ssm")))
    return json.loads(python(folders, "-S", "-c", code))  # -S: no other mamba_ssm that is installed


@pytest.fixture
def site(tmp_path):
    site = install(tmp_path / "site")
    record(site, "mamba_ssm", f"{__version__}+cpu", *files_of(site))
    return site


@pytest.fixture
def both(site):
    """With this project's causal-conv1d."""
    install_convolution(site)
    record(site, "causal_conv1d", f"1.7.0+mamba.{__version__}", *(site / "causal_conv1d").glob("*.py"))
    return site


def test_nothing_to_say(both):
    whose = f"1.7.0+mamba.{__version__}, this project's: {both / 'causal_conv1d' / '__init__.py'}"
    assert report(both) == [[], [], whose]


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
    (problem,), _ = examine(site)
    assert problem.startswith(
        f"1 file is not as installed with mamba_ssm {__version__}+cpu in {site}: missing: selective"
    )


def test_a_copy_over_this_package(site):
    write_copy(site)
    (site / "mamba_ssm" / "ops" / "older.py").write_text("")
    (problem,), notes = examine(site)
    files = ("__init__", "ops/__init__", "ops/selective_scan_interface")
    changed = ", ".join(f"mamba_ssm/{file}.py" for file in files)
    assert f": changed: {changed}; not of it: mamba_ssm/ops/older.py. Was another" in problem
    assert notes == []


# ---- causal-conv1d ---------------------------------------------------------------------------------------------------


def test_the_compiled_package(site):
    module = site / "causal_conv1d" / "__init__.py"
    module.parent.mkdir()
    module.write_text("__version__ = '1.7.1'\n")
    record(site, "causal_conv1d", "1.7.1", module)
    assert report(site) == [[], [], f"1.7.1, another project's: {module}"]


def test_none(site):
    assert report(site) == [[], [], "not installed"]


@pytest.mark.parametrize("name", ["causal_conv1d/__init__.py", "causal_conv1d.py"])
def test_one_that_nobody_has_installed(site, tmp_path, name):
    module = tmp_path / "elsewhere" / name
    module.parent.mkdir(parents=True)
    module.write_text("def causal_conv1d_fn(*arguments): return arguments[0]\n")
    (problem,), _, whose = report(site, tmp_path / "elsewhere")
    assert problem.startswith(f"causal_conv1d is {module}, which no installed package has brought. Remove it")
    assert whose == f"of unknown origin: {module}"


@pytest.mark.parametrize("version", ["1.7.1", f"1.7.0+mamba.{__version__}"])
def test_one_before_the_installed_one(site, tmp_path, version):
    install_convolution(site)
    record(site, "causal_conv1d", version, *(site / "causal_conv1d").glob("*.py"))
    module = tmp_path / "work" / "causal_conv1d" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.touch()
    (problem,), _ = examine(tmp_path / "work", site, site=site)
    assert problem.startswith(f"causal_conv1d is {module}, which is found before that of causal-conv1d {version}. Do")


def test_the_compiled_package_over_ours(both):
    """Its files over ours, then its library alone beside ours."""
    ours = (both / "causal_conv1d" / "__init__.py").read_bytes()
    (both / "causal_conv1d" / "__init__.py").write_text("__version__ = '1.7.0'\n")
    (problem,), _ = examine(both)
    assert problem.startswith(
        f"causal-conv1d 1.7.0+mamba.{__version__} in {both} is not as installed: changed: causal_conv1d/"
    )
    assert "Do `pip uninstall causal-conv1d` until none is left" in problem
    (both / "causal_conv1d" / "__init__.py").write_bytes(ours)
    library = both / "causal_conv1d_cuda.abi3.so"
    library.write_bytes(b"")
    (problem,), _ = examine(both)
    assert problem.startswith(
        f"causal_conv1d_cuda is {library}, which is found before that of causal-conv1d 1.7.0+mamba"
    )


def test_ours_over_the_compiled_package(site):
    module = site / "causal_conv1d" / "__init__.py"
    module.parent.mkdir()
    module.write_text("__version__ = '1.7.0'\n")
    record(site, "causal_conv1d", "1.7.0", module)
    install_convolution(site)
    (problem,), _ = examine(site)
    assert problem.startswith(f"causal-conv1d 1.7.0 in {site} is not as installed: changed: causal_conv1d/__init__.py")


def test_two_in_two_folders(both, tmp_path):
    other = tmp_path / "other"
    record(other, "causal_conv1d", "1.5.2")
    problems, _ = examine(both, other)
    (problem,) = problems
    assert "causal-conv1d is installed 2 times: 1.7.0+mamba." in problem
    assert f"{os.sep}site and 1.5.2 in {other}" in problem


def test_of_another_mamba_ssm(site):
    record(site, "causal_conv1d", "1.7.0+mamba.1.0.0")
    (problem,), _ = examine(site)
    assert problem.startswith(
        f"causal-conv1d 1.7.0+mamba.1.0.0 is a part of mamba_ssm 1.0.0, and this is {__version__}"
    )
