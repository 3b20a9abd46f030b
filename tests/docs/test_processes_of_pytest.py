"""README's test command takes all cores, and a single file or a debugger one process: tests/_helpers/parallel.py."""

import os
import shutil
import subprocess
import sys
import types

import pytest
from _helpers import parallel
from wheel_build import facts

GIB = 1 << 30
MADE = """
import os, pathlib, pytest, time

@pytest.mark.parametrize("number", range(40))
def test_it(number):
    time.sleep(0.05)
    name = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    (pathlib.Path(os.environ["SEEN"]) / name).write_text(str(os.environ.get("OMP_NUM_THREADS")))
"""


def config_of(folder, words=("tests",), xdist=True, **options):
    defaults = {"usepdb": False, "trace": False, "collectonly": False, "capture": "fd", "markexpr": "not slow"}
    plugins = {"numprocesses": None, "dist": "no"} if xdist else {}
    return types.SimpleNamespace(
        option=types.SimpleNamespace(**{**defaults, **plugins, **options}),
        args=[str(word) for word in words],
        invocation_params=types.SimpleNamespace(dir=folder),
        pluginmanager=types.SimpleNamespace(hasplugin=lambda name: xdist),
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tests" / "ops").mkdir(parents=True)
    (tmp_path / "tests" / "test_one.py").touch()
    return tmp_path


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 4)
    monkeypatch.setattr(parallel, "free_memory", lambda: 64 * GIB)
    monkeypatch.setattr(parallel, "has_gpu", lambda: False)


# words, options, processes that are set (None: none, which is one process)
RUNS = [
    (["tests"], {}, 4),
    (["tests/ops", "tests"], {}, 4),
    (["tests"], {"markexpr": "slow"}, 4),
    (["tests"], {"markexpr": "not gpu"}, 4),
    (["tests/test_one.py"], {}, None),
    (["tests/test_one.py::test_it"], {}, None),
    (["tests", "tests/test_one.py"], {}, None),
    (["tests"], {"markexpr": "gpu"}, None),  # they share one GPU
    (["tests"], {"markexpr": "gpu and not slow"}, None),
    (["tests"], {"usepdb": True}, None),
    (["tests"], {"trace": True}, None),
    (["tests"], {"capture": "no"}, None),
    (["tests"], {"collectonly": True}, None),
    (["tests"], {"numprocesses": 0}, 0),  # what the user says stays
    (["tests"], {"numprocesses": 3}, 3),
    (["tests"], {"dist": "loadfile"}, None),
]


@pytest.mark.parametrize(("words", "options", "processes"), RUNS)
def test_processes(folder, words, options, processes):
    config = config_of(folder, words, **options)
    line = parallel.set_up(config)
    assert config.option.numprocesses == processes
    assert line == ("4 processes, one for each core (-n 0: one in all)" if line else "")
    assert bool(line) == (processes == 4)


def test_with_a_gpu_one_process_has_its_tests(folder, monkeypatch):
    config = config_of(folder)
    parallel.set_up(config)
    assert config.option.dist == "worksteal"
    monkeypatch.setattr(parallel, "has_gpu", lambda: True)
    config = config_of(folder)
    parallel.set_up(config)
    assert config.option.dist == "loadgroup"


def test_without_xdist_the_header_says_so(folder):
    config = config_of(folder, xdist=False)
    assert parallel.set_up(config) == (
        "pytest-xdist is not installed: one process runs all tests (pip install pytest-xdist)"
    )
    assert not hasattr(config.option, "numprocesses")
    assert parallel.set_up(config_of(folder, ["tests/test_one.py"], xdist=False)) == ""


@pytest.mark.parametrize(
    ("cores", "memory", "processes"),
    [(2, 24, 2), (1, 24, 1), (16, 128, 16), (128, 512, 16), (8, 7, 3), (2, 1, 1), (4, None, 4)],
)
def test_how_many(cores, memory, processes):
    assert parallel.how_many(cores, memory if memory is None else memory * GIB) == processes


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 2, 1), (16, 4, 4), (2, 4, 1)])
def test_threads(monkeypatch, cores, processes, threads):
    monkeypatch.setattr(parallel, "cores", lambda: cores)
    assert parallel.threads(processes) == threads


@pytest.mark.parametrize(("words", "alone"), [([], False), (["tests/test_made.py"], True)])
def test_conftest_does_so(request, tmp_path, monkeypatch, words, alone):
    """A folder of its own with our conftest.py: each test says in which process it was."""
    monkeypatch.undo()  # the cores are this machine's
    if parallel.how_many(facts.cores(), facts.free_memory()) < 2:
        pytest.skip("one core, or memory for one process only")
    root, seen = request.config.rootpath, tmp_path / "seen"
    (tmp_path / "tests").mkdir()
    seen.mkdir()
    shutil.copy(root / "tests" / "conftest.py", tmp_path / "tests")
    paths = f"pythonpath = {root}/tests {root}/scripts {root}"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\n{paths}\n")
    (tmp_path / "tests" / "test_made.py").write_text(MADE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OMP_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=tmp_path, env={**clean, "SEEN": str(seen)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {file.name: file.read_text() for file in seen.iterdir()}
    if alone:
        assert found == {"alone": "None"}
    else:
        assert set(found) == {f"gw{number}" for number in range(len(found))} != {"gw0"}
        assert set(found.values()) == {str(parallel.threads(len(found)))}
        assert f"{len(found)} processes, one for each core (-n 0: one in all)" in done.stdout
