"""--rebuild: a wheel is published if its commit makes the same bytes here."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
import rebuild_check
from _helpers import wheels
from _helpers.checkouts import git
from _helpers.servers import HOST, free_port
from wheel_build import convolution
from wheel_build.build_info import recorded
from wheel_check.wheel import read_wheel

CUDA = {"cuda": True, "nvcc_version": "13.0.88", "architectures": ["75-real", "120-virtual"], "local_label": "cu130"}
ALL = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize(
    ("told", "switches"),
    [
        ({}, {"MAMBA_SSM_CUDA": "off", "MAMBA_RELEASE": "0", "MAMBA_LOCAL_VERSION": "cpu", "DEBUG": "0"}),
        ({"glibc": "2.28"}, {"MAMBA_RELEASE": "1"}),
        ({"local_label": "cpu.mine.debug", "debug": True}, {"MAMBA_LOCAL_VERSION": "cpu.mine", "DEBUG": "1"}),
        ({"dtypes": ["float32", "bfloat16"]}, {"MM_DISABLE_HALF": "1", "MM_DISABLE_BF16": "0"}),
        (CUDA, {"MAMBA_SSM_CUDA": "on", "TORCH_CUDA_ARCH_LIST": "75-real 120-virtual"}),
    ],
)
def test_switches_are_those_that_the_wheel_was_built_with(told, switches, monkeypatch):
    pretend_nvcc(monkeypatch, "13.0.88")
    assert rebuild_check.switches_of(pretend_wheel(told)).items() >= switches.items()


@pytest.mark.parametrize(
    ("told", "windows", "nvcc", "reason"),
    [
        ({}, True, None, "is of another system: build it again there"),
        (CUDA, False, None, "it was built with nvcc 13.0.88, and here is none: use a machine that has that version"),
        (CUDA, False, "12.9.86", "it was built with nvcc 13.0.88, and here is 12.9.86"),
    ],
)
def test_what_cannot_be_built_here_is_refused(told, windows, nvcc, reason, monkeypatch):
    pretend_nvcc(monkeypatch, nvcc)
    monkeypatch.setattr("rebuild_check.build", lambda *_: pytest.fail("it was tried"))
    (problem,) = rebuild_check.problems_of(pretend_wheel(told, windows))
    assert problem.startswith("it cannot be built again here: ") and reason in problem


def test_wheel_that_names_no_commit_is_not_published(wheel, publish, monkeypatch):
    monkeypatch.setattr("publish.Index.holds", lambda index, wheel: False)
    status, printed = publish(wheel, "--repository-url", "https://pypi.example.com", "--rebuild")
    assert status == 1 and f"{wheel}: it cannot be built again here: it names no commit" in printed


def pretend_wheel(told, windows=False):
    info = {"cuda": False, "local_label": "cpu", "glibc": None, "debug": False, "dtypes": ALL, "architectures": []}
    return SimpleNamespace(
        build_info={**info, **told},
        windows=windows,
        tag="py3-none-win_amd64" if windows else "py3-none-linux_x86_64",
        source=("a" * 40, False),
        path=Path("mamba_ssm.whl"),
        project="mamba_ssm",
    )


def pretend_nvcc(monkeypatch, version):
    nvcc = SimpleNamespace(path="nvcc") if version else None
    monkeypatch.setattr("rebuild_check.tools.discover", lambda environ: SimpleNamespace(nvcc=nvcc))
    said = f"Cuda compilation tools, release {version and version.rpartition('.')[0]}, V{version}"
    monkeypatch.setattr("rebuild_check.tools.run", lambda *words: said)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("setuptools", "cmake")), reason="no CMake")
def test_library_that_its_commit_does_not_make(checkout, gate, tmp_path, monkeypatch):
    """A real CPU-only wheel passes. One whose library and all its hashes were changed differs from what is built."""
    monkeypatch.setenv("MAMBA_SSM_CUDA", "off")
    monkeypatch.setenv("CMAKE_ARGS", "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    for name in ("MM_DISABLE_HALF", "MM_DISABLE_BF16"):
        monkeypatch.setenv(name, "1")
    subprocess.run([sys.executable, "setup.py", "bdist_wheel"], cwd=checkout, check=True, capture_output=True)
    for name in ("MM_DISABLE_HALF", "MM_DISABLE_BF16"):
        monkeypatch.delenv(name)
    (made,) = (checkout / "dist").glob("mamba_ssm-*.whl")
    monkeypatch.setenv("MAMBA_SSM_CUDA", "on")  # the wheel's own switches are taken
    status, printed, received = gate.upload(made, "--rebuild")
    assert status == 0 and set(received) == {made.name} and "note" not in printed, printed
    edited = change_library(made, tmp_path / "edited")
    status, printed, received = gate.upload(edited)
    assert status == 0 and "only scripts/rebuild_check.py" in printed, f"nothing but a rebuild tells of it\n{printed}"
    status, printed, received = gate.upload(edited, "--rebuild")
    assert (status, received) == (1, {}), printed
    assert f"{wheels.LIBRARY}: other contents" in printed and wheels.BUILD_INFO in printed


def change_library(wheel, folder):
    """The wheel with a byte of its library changed, in what compilers write of themselves, and every hash of it."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(wheels.LIBRARY)
    changed = library.replace(b"GCC: (", b"GCC; (", 1)
    assert changed != library
    told = {Path(wheels.LIBRARY).name: recorded(changed)}
    with zipfile.ZipFile(wheels.repack(wheel, folder, build_info={"libraries": told})) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
    return wheels.write(folder / wheel.name, contents | {wheels.LIBRARY: changed})


def test_rebuilt_wheel_is_published(committed, gate):
    for printed in gate.accepts(committed, "--rebuild"):
        assert f"building {committed.name} again from commit" in printed


def test_nothing_is_built_before_the_cheap_checks(committed, gate, monkeypatch):
    """No index named, one that cannot be reached, a reserved label."""
    monkeypatch.setattr("rebuild_check.problems_of", lambda wheel: pytest.fail("it was built"))
    unknown, gone = [], ["--repository-url", f"http://{HOST}:{free_port()}/"]
    for words, reason in ((unknown, "no index is named"), (gone, "cannot be reached")):
        status, printed = gate.publish(committed, "--rebuild", *words, strict=True)
        assert status == 1 and reason in printed
    monkeypatch.setattr("make_index.RESERVED", (read_wheel(committed).version.local,))
    status, printed = gate.index(committed.parent, "--rebuild")
    assert status == 1 and "is a file or folder of every index" in printed


def test_rebuild_of_a_commit_that_no_branch_holds(checkout, committed, gate):
    git(checkout, "commit", "--quiet", "--amend", "--message=another")
    status, printed, received = gate.upload(committed, "--rebuild")
    assert (status, set(received)) == (0, {committed.name}), printed


def test_wheel_that_its_commit_does_not_make(committed, gate, checkout, tmp_path):
    """Every file is right, and the archive was packed by somebody else."""
    other = convolution.build(checkout, tmp_path, 1_700_000_000)
    shutil.copy(other, committed)
    for printed in gate.refuses(committed, "--rebuild"):
        assert "it differs: the same contents, packed in another way" in printed


def test_build_does_not_see_the_password(committed, gate, checkout, monkeypatch):
    seen = []
    run = rebuild_check.subprocess.run

    def look(command, **options):
        seen.append(options.get("env", {}))
        return run(command, **options)

    monkeypatch.setattr("rebuild_check.subprocess.run", look)
    assert gate.upload(committed, "--rebuild")[0] == 0
    assert os.environ["TWINE_PASSWORD"] and not any("TWINE_PASSWORD" in environ for environ in seen if environ)
