"""The doctor in folders as pip leaves them, whole and broken: what it says, in how many lines, and its exit code."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from _helpers.copies import COPY, files_of, install, record
from wheel_build.build_info import recorded

from mamba_ssm import __version__
from mamba_ssm._native import loader

LIBRARY = loader.library_path("cpu").name
INFO = "mamba_ssm/lib/build_info.json"
LABELLED = f"{__version__}+cpu"
NO_TORCH = f"mamba_ssm needs torch 2.2 or newer, which {sys.executable} does not have; do: pip install torch"
DOORS = ("mamba_ssm", "mamba_ssm_doctor")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A CPU-only installation."""
    site = install(tmp_path_factory.mktemp("installed") / "site")
    library = site / "mamba_ssm" / "lib" / LIBRARY
    told = {"local_label": "cpu", "cuda": False, "libraries": {LIBRARY: recorded(library.read_bytes())}}
    (site / INFO).write_text(json.dumps(told))
    record(site, "mamba_ssm", LABELLED, *files_of(site))
    return site


@pytest.fixture
def site(original, tmp_path):
    return shutil.copytree(original, tmp_path / "site")


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory):
    """A folder with torch and what it needs, without the mamba_ssm and causal_conv1d of this Python."""
    folder = tmp_path_factory.mktemp("torch")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not any(name in entry.name for name in ("mamba", "selective_scan", "causal_conv1d", ".pth", "__pycache__")):
            try:
                (folder / entry.name).symlink_to(entry)
            except OSError:
                pytest.skip("no links here")
    return folder


@pytest.fixture
def start(tmp_path):
    """start(*folders, words=, door=, cwd=, ...): the doctor with these folders on the path, as it ended."""
    empty = tmp_path / "empty"
    empty.mkdir()

    def start(*folders, words=(), door="mamba_ssm", cwd=empty, encoding="utf-8", **options):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environ |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONIOENCODING": encoding}
        # -S: none of the packages that this Python has.
        command = [sys.executable, "-S", "-m", door, *words]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        done = subprocess.run(command, cwd=cwd, env=environ, text=True, encoding=encoding, timeout=300, **options)
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
        return done

    return start


@pytest.fixture
def report(start):
    """The JSON report. Most of what is wrong is found without torch, whose import takes long."""

    def report(*folders, **options):
        done = start(*folders, words=["--json"], **options)
        found = json.loads(done.stdout)
        assert done.returncode == (0 if found["healthy"] else 1) and not done.stderr
        return found

    return report


@pytest.fixture
def problems(report):
    """The problems, but that there is no torch here."""
    return lambda *folders, **options: [text for text in report(*folders, **options)["problems"] if text != NO_TORCH]


def checkout(site):
    """The site as a checkout: no metadata, compat's modules in a folder of their own."""
    shutil.rmtree(site / f"mamba_ssm-{LABELLED}.dist-info")
    for name in ("csrc", "compat"):
        (site / name).mkdir()
    (site / "setup.py").touch()
    for module in site.glob("*_*.py"):
        module.rename(site / "compat" / module.name)
    return site


# ---- whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_a_wheel_is_healthy(start, original, torch_alone, door):
    done = start(original, torch_alone, door=door)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr, done.stdout
    assert lines[1] == f"files       a wheel of mamba_ssm {LABELLED}, installed in {original}"
    assert lines[2] == "beside      causal_conv1d: not installed"
    assert lines[-1] == "verdict     healthy: mamba_ssm works on cpu"


def test_files_that_are_links(report, original, tmp_path):
    """As uv installs with --link-mode=symlink."""
    try:
        site = shutil.copytree(original, tmp_path / "linked", copy_function=os.symlink)
    except OSError:
        pytest.skip("no links here")
    for door in DOORS:
        found = report(site, door=door)
        assert found["problems"] == [NO_TORCH] and found["notes"] == []
        assert found["installation"]["is"] == f"a wheel of mamba_ssm {LABELLED}, installed in {site}"


def test_a_checkout_is_healthy(start, original, site, torch_alone):
    """README's Install, typed where the build ended: the wheel is installed, and Python takes the checkout."""
    source = checkout(site)
    done = start(source, torch_alone, cwd=source)
    assert done.returncode == 0, done.stdout
    assert f"files       the checkout {source}, which is not installed\n" in done.stdout
    assert (
        "selective_scan_cuda_oflex_rh: not on Python's path, since they are in this checkout's folder compat"
        in done.stdout
    )
    done = start(original, torch_alone, cwd=source)
    assert done.returncode == 0, done.stdout
    assert f"note        mamba_ssm {LABELLED} in {original} is installed too. Python started in {source}" in done.stdout


def test_an_editable_install_is_healthy(report, site, torch_alone, tmp_path):
    source = checkout(site)
    info = record(tmp_path / "packages", "mamba_ssm", LABELLED)
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": source.as_uri()}))
    found = report(tmp_path / "packages", source, source / "compat", torch_alone)
    assert found["healthy"] and all("CUDA build of torch" in note for note in found["notes"]), found
    assert found["installation"]["is"] == f"the checkout {source}, installed as editable ({LABELLED})"


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_no_torch(start, original, door):
    done = start(original, door=door)
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("problem")] == [f"problem     {NO_TORCH}"]
    assert lines[-1] == f"verdict     NOT healthy: 1 problem: {NO_TORCH}"
    assert any(line.startswith("library     mamba_cpu: loaded (") for line in lines)


@pytest.mark.parametrize(
    "text,words",
    [
        (r"raise OSError('libtorch.so: cannot open\nshared object file')", "OSError: libtorch.so: cannot open shared"),
        ("import no_such_module", "No module named 'no_such_module'. Install that, or reinstall torch"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_torch_that_cannot_be_imported(start, original, tmp_path, text, words):
    (tmp_path / "torch.py").write_text(text)
    done = start(original, tmp_path)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("problem"))
    assert line.startswith("problem     torch cannot be imported: ") and words in line
    assert done.returncode == 1


def test_something_else_that_is_called_torch(problems, original, tmp_path):
    folder = tmp_path / "work" / "torch"
    folder.mkdir(parents=True)
    words = "which is not PyTorch. Rename or remove it, or start Python in another folder"
    assert problems(original, cwd=folder.parent) == [f"`import torch` takes the folder {folder}, {words}"]
    (folder / "__init__.py").touch()
    assert problems(original, cwd=folder.parent) == [f"`import torch` takes {folder / '__init__.py'}, {words}"]


def test_torch_that_is_too_old(report, original, tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.1.2+cu121'\nclass version:\n    cuda = None\n")
    found = report(original, tmp_path)
    assert found["problems"] == [
        "mamba_ssm needs torch 2.2 or newer, and this is 2.1.2+cu121; do: pip install --upgrade torch"
    ]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["__init__.py", "modules/mamba_simple.py", "ops/norm/forward.py", "py.typed", "../selective_scan_cuda.py"]
)
def test_a_missing_file(problems, site, name):
    (site / "mamba_ssm" / name).unlink()
    (problem,) = problems(site)
    name = os.path.normpath(f"mamba_ssm/{name}").replace(os.sep, "/")
    assert problem.startswith(f"1 file is not as installed with mamba_ssm {LABELLED} in {site}: missing: {name}. Was")
    assert "pip install --force-reinstall" in problem


def test_a_missing_file_is_one_of_two_lines_with_torch(start, site, torch_alone):
    (site / "mamba_ssm" / "modules" / "mamba_simple.py").unlink()
    done = start(site, torch_alone)
    first, second = (line for line in done.stdout.splitlines() if line.startswith("problem"))
    assert "missing: mamba_ssm/modules/mamba_simple.py" in first and done.returncode == 1
    assert second.startswith(
        "problem     mamba_ssm cannot be imported: ModuleNotFoundError: No module named 'mamba_ssm.mo"
    )


@pytest.mark.parametrize(
    "name,text",
    [
        ("_native/loader.py", "from mamba_ssm.utils import older\n"),
        ("_native/abi.py", None),
        ("_native/abi.py", "print 'of Python 2'\n"),
        ("_native/errors.py", "\0" * 100),
        ("version.py", None),
    ],
)
def test_what_the_doctor_itself_needs(start, site, name, text):
    path = site / "mamba_ssm" / name
    path.write_text(text) if text else path.unlink()
    done = start(site)
    lines = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert done.returncode == 1 and not done.stderr
    if name == "version.py":
        assert len(lines) == 1 and "the doctor cannot start: " in lines[0] and "Reinstall mamba_ssm" in lines[0]
    else:
        assert f"{'changed' if text else 'missing'}: mamba_ssm/{name}" in lines[0]
        assert "mamba_ssm cannot be imported: " in lines[1]


@pytest.mark.parametrize("name", ["__main__.py", "_doctor/report.py", "_doctor/__init__.py", "."])
def test_files_of_the_doctor(start, site, name):
    path = site / "mamba_ssm" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = start(site, door="mamba_ssm_doctor")
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.startswith("problem     the doctor cannot start: ") and "Reinstall mamba_ssm" in done.stdout


def test_many_changed_and_added_files(problems, site):
    files = sorted((site / "mamba_ssm" / "models").glob("*.py"))
    for path in files:
        path.write_text("# another version's\n")
    for name in "abcde":
        (site / "mamba_ssm" / "ops" / f"{name}.py").touch()
    (site / "mamba_ssm" / "ops" / "a.pyc").touch()
    (problem,) = problems(site)
    assert problem.startswith(f"{len(files) + 5} files are not as installed")
    first = ", ".join(f"mamba_ssm/models/{path.name}" for path in files[:3])
    assert f"changed: {first} and {len(files) - 3} more" in problem
    assert "not of it: mamba_ssm/ops/a.py, mamba_ssm/ops/b.py, mamba_ssm/ops/c.py and 2 more" in problem


def test_a_library_with_one_byte_changed(start, site):
    """Of the same size: it would load and run."""
    library = site / "mamba_ssm" / "lib" / LIBRARY
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    done = start(site)
    lines = done.stdout.splitlines()
    first, second = (line for line in lines if line.startswith("problem"))
    assert f"changed: mamba_ssm/lib/{LIBRARY}" in first and second.endswith(NO_TORCH)
    assert "library     mamba_cpu: NOT loaded" in lines


def test_a_file_of_another_size(problems, site):
    with (site / "selective_scan_cuda.py").open("a") as file:
        file.write("# more\n")
    (problem,) = problems(site)
    assert "changed: selective_scan_cuda.py. " in problem


def test_a_record_in_windows_spelling(report, site):
    record = site / f"mamba_ssm-{LABELLED}.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("/", "\\"))
    found = report(site)["installation"]
    assert found["changed"] == found["missing"] == found["added"] == []


@pytest.mark.parametrize("text", [None, "mamba_ssm/version.py\n", "\0"])
def test_no_record(problems, site, text):
    path = site / f"mamba_ssm-{LABELLED}.dist-info" / "RECORD"
    path.write_text(text) if text else path.unlink()
    (problem,) = problems(site)
    assert problem.startswith(f"the files of mamba_ssm {LABELLED} in {site} cannot be compared with its RECORD: ")


def test_a_deleted_build_info(problems, report, site):
    (site / INFO).unlink()
    (problem,) = problems(site)
    assert f"missing: {INFO}" in problem
    source = checkout(site)
    (problem,) = problems(source)
    assert problem.startswith(f"{source / INFO} is missing: whether the libraries beside it are whole is not known")


# ---- other packages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba_ssm", "mamba-ssm", "Mamba.SSM"])
def test_two_in_one_folder(problems, site, name):
    """As `pip install --target` leaves it. RECORD is that of the files which are there."""
    other = record(site, name, "2.2.2", site / "mamba_ssm" / "__init__.py")
    (other / "RECORD").write_text("mamba_ssm/__init__.py,sha256=AAAA,5\n")
    (problem,) = problems(site)
    assert problem.startswith("mamba_ssm is installed 2 times: ")
    assert f"{LABELLED} in {site}" in problem and f"2.2.2 in {site}" in problem
    assert "Do `pip uninstall mamba_ssm` until none is left" in problem


def test_two_in_two_folders(problems, site, tmp_path):
    record(tmp_path / "other", "mamba_ssm", "2.3.0")
    (problem,) = problems(site, tmp_path / "other")
    assert problem.startswith(
        f"mamba_ssm is installed 2 times: {LABELLED} in {site} and 2.3.0 in {tmp_path / 'other'}."
    )


def test_another_mamba_ssm_first(problems, site, tmp_path):
    """`python -m mamba_ssm` is the other's then."""
    other = tmp_path / "work" / "mamba_ssm" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text(COPY["__init__.py"])
    (problem,) = problems(site, cwd=tmp_path / "work", door="mamba_ssm_doctor")
    assert problem.startswith(
        f"`import mamba_ssm` takes {other}, another mamba_ssm, which comes first on Python's path."
    )
    assert problem.endswith("Rename or remove the other, or start Python in another folder")


def test_the_self_test_is_this_packages_behind_another(report, original, torch_alone, tmp_path):
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("raise ImportError('the other')\n")
    found = report(original, torch_alone, cwd=tmp_path, door="mamba_ssm_doctor")
    assert len(found["problems"]) == 1 and all(result["ok"] for result in found["self_test"]["cpu"].values())


def test_isolated(original, tmp_path):
    """python -I takes nothing from the folder that it is started in, so another mamba_ssm there is not met."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=sys.platform != "win32")
    (packages,) = [*environment.glob("lib/python*/site-packages"), *environment.glob("Lib/site-packages")]
    (packages / "installed.pth").write_text(f"{original}\n")
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").touch()
    (python,) = [*environment.glob("bin/python"), *environment.glob("Scripts/python.exe")]
    for door in DOORS:
        done = subprocess.run([python, "-I", "-m", door, "--json"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and not done.stderr
        (problem,) = json.loads(done.stdout)["problems"]
        assert problem.startswith("mamba_ssm needs torch 2.2 or newer, which ")


# ---- output ----------------------------------------------------------------------------------------------------------


def test_version_needs_nothing(start, original):
    done = start(original, words=["--version"])
    assert (done.returncode, done.stdout) == (0, f"mamba_ssm {__version__} from {original / 'mamba_ssm'}\n")


def test_arguments(start, original):
    done = start(original, words=["--help"])
    assert done.returncode == 0 and "--json" in done.stdout and "--version" in done.stdout
    done = start(original, words=["--jsno"])
    assert done.returncode == 2 and "unrecognized arguments: --jsno" in done.stderr


@pytest.mark.parametrize("words,code", [([], 1), (["--json"], 1), (["--version"], 0), (["--help"], 0)])
def test_a_pipe_that_nobody_reads(start, original, words, code):
    reads, writes = os.pipe()
    os.close(reads)
    done = start(original, words=words, stdout=writes)
    os.close(writes)
    assert done.returncode == code and done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", [[], ["--json"], ["--version"]])
def test_a_full_disk(start, original, words):
    with open("/dev/full", "w") as full:
        done = start(original, words=words, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "mamba_ssm: the report cannot be written: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's >&-")
def test_no_output_at_all(start, original):
    done = start(original, words=["--version"], stdout=None, preexec_fn=lambda: os.close(1))
    assert done.returncode == 1
    assert done.stderr == "mamba_ssm: the report cannot be written: Bad file descriptor\n"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_path_that_the_console_cannot_show(start, original, tmp_path, encoding):
    site = shutil.copytree(original, tmp_path / "модель \N{SNAKE}")
    done = start(site, encoding=encoding)
    shown = str(site) if encoding == "utf-8" else str(site).encode(encoding, "backslashreplace").decode(encoding)
    assert f"files       a wheel of mamba_ssm {LABELLED}, installed in {shown}\n" in done.stdout
