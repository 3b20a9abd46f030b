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
# A made-up project that has our conftest.py: a torch that may see a GPU, and tests that say where they were.
TORCH = """
import os, types
cuda = types.SimpleNamespace(is_available=lambda: "GPU" in os.environ)
version = types.SimpleNamespace(cuda="13.0")
set_num_threads = manual_seed = lambda number: None
"""
MADE = """
import os, pathlib, pytest, time

def say(kind):
    name = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    if name != "alone":
        time.sleep(0.05)  # so that every process gets some
    (pathlib.Path(os.environ["SEEN"]) / f"{name}-{kind}").write_text(str(os.environ.get("OMP_NUM_THREADS")))

@pytest.mark.parametrize("number", range(40))
def test_cpu(number):
    say("cpu")

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(20))
def test_gpu(number):
    say("gpu")
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
    (["tests"], {"markexpr": "gpu"}, 4),
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


@pytest.mark.parametrize(
    ("expression", "processes"), [("not slow", None), ("gpu", None), ("not gpu", 4), ("not slow and not gpu", 4)]
)
def test_tests_that_share_a_gpu_have_one_process(folder, monkeypatch, expression, processes):
    monkeypatch.setattr(parallel, "has_gpu", lambda: True)
    config = config_of(folder, markexpr=expression)
    parallel.set_up(config)
    assert config.option.numprocesses == processes
    assert config.option.dist == ("worksteal" if processes else "no")


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


def run(request, tmp_path, words=(), **environ):
    """{process-kind of test: its OMP_NUM_THREADS}, and what pytest said."""
    root, seen = request.config.rootpath, tmp_path / "seen"
    for folder in (tmp_path / "tests", tmp_path / "stub", seen):
        folder.mkdir()
    shutil.copy(root / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "stub" / "torch.py").write_text(TORCH)
    (tmp_path / "tests" / "test_made.py").write_text(MADE)
    paths = f"pythonpath = {tmp_path}/stub {root}/tests {root}/scripts"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\nmarkers = gpu\n{paths}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OMP_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *words]
    environ = {**clean, "SEEN": str(seen), **environ}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name: file.read_text() for file in seen.iterdir()}, done.stdout


def test_conftest_takes_all_cores(request, tmp_path, monkeypatch):
    monkeypatch.undo()  # the cores are this machine's
    count = parallel.how_many(facts.cores(), facts.free_memory())
    if count < 2:
        pytest.skip("one core, or memory for one process only")
    found, said = run(request, tmp_path)
    assert {name for name in found if name.endswith("cpu")} == {f"gw{number}-cpu" for number in range(count)}
    assert set(found.values()) == {str(parallel.threads(count))}
    assert f"{count} processes, one for each core (-n 0: one in all)" in said


@pytest.mark.parametrize("words", [["tests/test_made.py"], ["-n", "0"], ["-p", "no:xdist"]])
def test_conftest_leaves_one_process(request, tmp_path, words):
    found, said = run(request, tmp_path, words)
    assert {name.split("-")[0] for name in found} == {"alone"}
    assert set(found.values()) == {"None"}
    assert ("pytest-xdist is not installed" in said) == ("no:xdist" in words)


def test_conftest_leaves_one_process_with_a_gpu(request, tmp_path):
    assert set(run(request, tmp_path, GPU="1")[0]) == {"alone-cpu", "alone-gpu"}
