"""What the publishing tests share: a wheel, servers, and fresh environments that see the torch of this one.

Imports of what the extra brings are inside of the fixtures: without it, _helpers/publish_extra.py skips the tests.
"""

import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import venv

import pytest
from _helpers import wheels
from _helpers.checkouts import git
from _helpers.commits import commit_tree
from packaging.requirements import Requirement
from wheel_build.convolution import build as build_convolution

PROGRAMS = ("pypi-server", "devpi-server", "devpi-init", "uv")


@pytest.fixture(scope="session")
def programs():
    """The servers and uv; skips where they are not on PATH."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not on PATH: see tests/publish/requirements.txt")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A CPU-only wheel of this source tree."""
    if not (wheels.ROOT / wheels.LIBRARY).exists():
        pytest.skip(f"{wheels.LIBRARY} is not built: pip install -e .")
    from wheel_check import verify

    made = wheels.assemble(tmp_path_factory.mktemp("wheel"))
    assert verify(made) == [], "is the built library of this source? pip install -e . builds it again"
    return made


@pytest.fixture(scope="session")
def convolution(tmp_path_factory):
    """The wheel of causal-conv1d."""
    return wheels.assemble_convolution(tmp_path_factory.mktemp("convolution"))


@pytest.fixture(scope="session")
def this_tree(tmp_path_factory):
    """A repository whose one commit holds this source tree as it is."""
    folder = tmp_path_factory.mktemp("this") / "tree"
    if not commit_tree(wheels.ROOT, folder):
        pytest.skip("this source tree is no git checkout, or there is no git")
    return folder


@pytest.fixture
def checkout(this_tree, tmp_path, monkeypatch):
    """A copy of that repository, which the scripts take for their own."""
    folder = tmp_path / "checkout"
    git(this_tree, "clone", "--quiet", ".", str(folder))
    for module in ("wheel_check.source", "rebuild_check"):
        monkeypatch.setattr(f"{module}.ROOT", folder)
    return folder


@pytest.fixture
def committed(checkout, tmp_path):
    """A wheel of a commit: causal-conv1d's, which takes no compiler."""
    (tmp_path / "dist").mkdir()
    return build_convolution(checkout, tmp_path / "dist", None)


@pytest.fixture(scope="session")
def pypiserver(programs, tmp_path_factory):
    from _helpers.servers import PyPIServer

    server = PyPIServer(tmp_path_factory.mktemp("pypiserver"))
    with server.running():
        yield server


@pytest.fixture(scope="session")
def devpi(programs, tmp_path_factory):
    from _helpers.servers import Devpi

    server = Devpi(tmp_path_factory.mktemp("devpi") / "server")
    with server.running():
        yield server


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    """Nothing of the user's pip, uv, twine, Python or proxy settings; no keyring; nobody to answer a question."""
    for name in list(os.environ):
        if name.upper().startswith(("PIP_", "UV_", "TWINE_", "MAMBA", "PYTHONPATH")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture
def publish(monkeypatch, capsys):
    """publish(*words, user=..., password=..., strict=False) -> (exit status, everything printed).

    Most wheels of these tests are of this tree as it is, which no commit holds; `committed` is of one.
    """
    import publish as script
    from _helpers.servers import PASSWORD, USER

    def run(*words, user=USER, password=PASSWORD, strict=False):
        for name, value in (("TWINE_USERNAME", user), ("TWINE_PASSWORD", password)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = script.main([*map(str, words), *([] if strict else ["--no-strict"])])
        printed = "".join(capsys.readouterr())
        assert (password or PASSWORD) not in printed
        return status, printed

    return run


class Environment:
    """A fresh virtual environment, which sees one project and what that needs, and nothing else of this one."""

    def __init__(self, folder, project):
        builder = venv.EnvBuilder(with_pip=False, symlinks=True)
        builder.create(folder)
        self.folder, self.python = folder, folder / "bin" / "python"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        # In place, and metadata as true folders: uv does not look where a .pth file or a link points.
        for entry in _entries(project):
            if entry.name.endswith(".dist-info"):
                shutil.copytree(entry, site_packages / entry.name)
            else:
                (site_packages / entry.name).symlink_to(entry)

    def pip(self, *words):
        return _run([sys.executable, "-m", "pip", "--python", self.python, "install", "--no-cache-dir", *words])

    def uv(self, *words):
        return _run([shutil.which("uv"), "pip", "install", "--python", self.python, *words])

    def use(self, folder):
        """The doctor, then a forward of the block, outside of the source tree."""
        script = (
            "import torch, mamba_ssm\n"
            "from mamba_ssm import Mamba, __main__ as doctor\n"
            "torch.set_num_threads(1)\n"
            "assert doctor.main([]) == 0\n"
            "out = Mamba(16)(torch.randn(2, 7, 16))\n"
            "assert out.shape == (2, 7, 16) and out.isfinite().all()\n"
            "print('from', mamba_ssm.__file__)\n"
        )
        status, printed = _run([self.python, "-c", script], cwd=folder)
        assert status == 0, printed
        assert f"from {self.folder}" in printed
        assert "healthy: mamba_ssm works on cpu" in printed


def _run(command, **options):
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        **options,
    )
    return done.returncode, done.stdout


def _entries(project):
    """The files and folders in site-packages of a project and everything it requires."""
    entries, seen, todo = {}, set(), [(project, "")]
    while todo:
        name, extra = asked = todo.pop()
        if asked in seen:
            continue
        seen.add(asked)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                entries[file.parts[0]] = distribution.locate_file(file.parts[0])
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                # CUDA's parts are extras: torch requires cuda-toolkit[cudart], which requires nvidia-cuda-runtime.
                todo += [(requirement.name, each) for each in ("", *requirement.extras)]
    return list(entries.values())


@pytest.fixture
def environment_of(tmp_path):
    """environment_of(project) -> a fresh Environment"""
    return lambda project: Environment(tmp_path / "environment", project)


@pytest.fixture
def environment(environment_of):
    return environment_of("torch")


@pytest.fixture
def gate(publish, tmp_path, capsys):
    from _helpers.gate import Gate

    return Gate(publish, tmp_path / "site", capsys)
