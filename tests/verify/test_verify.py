"""The verifier: real wheels pass, and every listed forgery is refused with its reason."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from _helpers.wheel_forge import BUILD_INFO, CPU, ROOT, forge, info  # first: it may skip this module

# isort: split
from verify_wheel import main
from wheel_check import MACHINE_CODE, verify
from wheel_check.source import UNCOMPARED

pytestmark = pytest.mark.slow
FOREIGN = "mamba_ssm/lib/libother.so"
VERSION_PY = "mamba_ssm/version.py"


def test_what_the_project_builds_is_fit(real_wheel, cuda_wheel, windows_wheel):
    assert verify(real_wheel) == []
    assert verify(cuda_wheel) == []
    assert verify(windows_wheel) == []


def test_forging_alone_changes_nothing(real_wheel, tmp_path):
    assert verify(forge(real_wheel, tmp_path)) == []


def replace(old, new):
    def change(content):
        assert old in content
        return content.replace(old, new)

    return change


def other_hash(content):
    return re.sub(rb'(?<="content": ")\w+', lambda found: found.group()[::-1], content)


def listing(name):
    def change(content):
        document = json.loads(content)
        document["components"].append({"type": "library", "name": name})
        return json.dumps(document).encode()

    return change


# what is done to the real wheel -> the reason given
FORGERIES = {
    # edited by hand: the file changed, RECORD not
    "METADATA edited": (
        {"files": {"METADATA": replace(b">=2.2", b">=2.0")}, "careful": False},
        "METADATA: its hash is not the one in RECORD: the file was changed after the build",
    ),
    "module edited": (
        {"files": {VERSION_PY: replace(b"__version__", b"__version__ ")}, "careful": False},
        "version.py: its hash is not the one in RECORD",
    ),
    "library exchanged": ({"files": {CPU: b"\x7fELF of somebody"}, "careful": False}, "cpu.so: its hash is not"),
    "file added": ({"files": {"mamba_ssm/new.py": b""}, "careful": False}, "mamba_ssm/new.py: is not in RECORD"),
    "file removed": ({"files": {VERSION_PY: None}, "careful": False}, "version.py', which is not in"),
    "RECORD gone": ({"files": {"RECORD": None}}, "RECORD: missing"),
    "RECORD with wrong sizes": ({"files": {"RECORD": replace(b"\nmamba", b"9\nmamba")}}, "bytes, and RECORD says"),
    "RECORD with a broken line": ({"files": {"RECORD": lambda old: b"half a line\n" + old}}, "not three fields"),
    "RECORD names a file twice": ({"files": {"RECORD": lambda old: old.split(b"\n")[0] + b"\n" + old}}, "twice"),
    "RECORD is no text": ({"files": {"RECORD": b"\xff\xfe\x00"}}, "record cannot be read: UnicodeDecodeError"),
    # edited with care: RECORD agrees
    "another name": ({"files": {"METADATA": replace(b"Name: mamba_ssm", b"Name: mamba-ssm2")}}, "the name is"),
    "another version": ({"files": {"METADATA": replace(b"+cpu", b"+cu130")}}, "METADATA: the version is"),
    "another tag": ({"files": {"WHEEL": replace(b"manylinux_2_28", b"linux")}}, "WHEEL: Tag is py3-none-linux_x86_64"),
    "a second tag": ({"files": {"WHEEL": lambda old: b"Tag: py3-none-any\n" + old}}, "WHEEL: Tag is"),
    "pure": ({"files": {"WHEEL": replace(b"false", b"true")}}, "Root-Is-Purelib is true"),
    "another Python": ({"files": {"METADATA": replace(b">=3.10", b">=3.8")}}, "Requires-Python is"),
    "METADATA gone": ({"files": {"METADATA": None}}, "METADATA: missing"),
    "METADATA is no metadata": ({"files": {"METADATA": b"\x00\xff" * 50}}, "names cannot be read"),
    "another label": ({"files": {BUILD_INFO: info(local_label="cu130")}}, "build_info.json: says 2.4.0+cu130"),
    "another package version": ({"files": {BUILD_INFO: info(package_version="2.3")}}, "says 2.3+cpu, the file name"),
    "CUDA without a library": ({"files": {BUILD_INFO: info(cuda=True)}}, "libmamba_cuda.so: missing"),
    "architectures without CUDA": ({"files": {BUILD_INFO: info(architectures=["90-real"])}}, "the architectures are"),
    "another ABI": ({"files": {BUILD_INFO: info(abi_version=99)}}, "ABI_VERSION is"),
    "a debug build": ({"files": {BUILD_INFO: info(debug=True)}}, "debug build"),
    "build_info.json gone": ({"files": {BUILD_INFO: None}}, "build info cannot be read: KeyError"),
    "build_info.json is a list": ({"files": {BUILD_INFO: b"[1]"}}, "holds no JSON object"),
    "triton required": (
        {"files": {"METADATA": replace(b"\nRequires-Dist: torch", b"\nRequires-Dist: triton\nRequires-Dist: torch")}},
        "Requires-Dist has triton: there is no triton",
    ),
    "unused requirement": (
        {"files": {"METADATA": replace(b"\nRequires-Dist: torch", b"\nRequires-Dist: scipy\nRequires-Dist: torch")}},
        "Requires-Dist has scipy, which every module of the wheel can do without",
    ),
    "requirement from a URL": (
        {"files": {"METADATA": replace(b"torch>=2.2", b"torch @ https://evil.example/torch.whl")}},
        "evil.example/torch.whl: it names a URL",
    ),
    "extra from a URL": (
        {"files": {"METADATA": replace(b"huggingface_hub>=0.20", b"huggingface_hub @ https://evil.example/a.whl ")}},
        "evil.example/a.whl ; extra == \"hub\": it names a URL",
    ),
    "requirement under a condition": (
        {"files": {"METADATA": replace(b"torch>=2.2", b'torch>=2.2 ; python_version >= "2"')}},
        'Requires-Dist has torch>=2.2; python_version >= "2", under a condition',
    ),
    "condition beside an extra": (
        {"files": {"METADATA": replace(b'extra == "hub"', b'extra == "hub" or python_version > "3"')}},
        'or python_version > "3", under a condition',
    ),
    "foreign extra": (
        {"files": {"METADATA": replace(b'extra == "hub"', b'extra == "all"')}},
        "and the project has no extra all",
    ),
    "requirement that only one guarded import wants": (
        {"files": {"METADATA": replace(b'; extra == "hub"', b"")}},
        "Requires-Dist has huggingface_hub>=0.20, which every module of the wheel can do without",
    ),
    "requirement gone": (
        {"files": {"METADATA": replace(b"\nRequires-Dist: torch>=2.2", b"")}},
        "imports torch, which is not in Requires-Dist",
    ),
    "triton imported": ({"files": {"mamba_ssm/new.py": b"def f():\n    import triton.x\n"}}, "new.py: imports triton"),
    "module that is no Python": ({"files": {"mamba_ssm/new.py": b"def ("}}, "requirements cannot be read: SyntaxError"),
    "foreign library": ({"files": {FOREIGN: b"\x7fELF"}}, f"{FOREIGN}: is no file of this project's wheels"),
    "foreign file": ({"files": {"mamba_ssm/data.bin": b"?"}}, "data.bin: is no file of this project's wheels"),
    "foreign package": ({"files": {"torch/__init__.py": b""}}, "torch/__init__.py: is no file of this project's"),
    "compiled module": ({"files": {"mamba_ssm/version.pyc": b"?"}}, "version.pyc: is no file of this project's wheels"),
    "hints not marked": ({"files": {"mamba_ssm/py.typed": None}}, "mamba_ssm/py.typed: missing"),
    "library gone": ({"files": {CPU: None}}, "libmamba_cpu.so: missing"),
    "library cut short": ({"files": {CPU: lambda old: old[: len(old) // 2]}}, "is no library that could be read"),
    "library not recorded": ({"files": {BUILD_INFO: info(libraries={})}}, "not tell size and sha256 of libmamba_cpu"),
    "SBOM gone": ({"files": {"SBOM": None}}, "mamba_ssm.cdx.json: missing"),
    "SBOM that is none": ({"files": {"SBOM": b"{}"}}, "cdx.json: is no CycloneDX 1.6 document"),
    "SBOM of another version": ({"files": {"SBOM": replace(b"+cpu", b"+cu130")}}, "cdx.json: is of version"),
    "SBOM of another library": ({"files": {"SBOM": other_hash}}, "does not tell of"),
    "SBOM with CUDA": ({"files": {"SBOM": listing("cudart_static")}}, "lists cudart_static"),
    # of no one
    "other top level": (
        {"files": {"top_level.txt": b"mamba_ssm\ntorch\n"}},
        "top_level.txt: holds b'mamba_ssm\\ntorch\\n', and the build writes",
    ),
    "text in py.typed": ({"files": {"mamba_ssm/py.typed": b"partial\n"}}, "py.typed: holds b'partial"),
    # two readers
    "folded field": (
        {"files": {"METADATA": replace(b"\nKeywords: mamba", b"\nKeywords:\n mamba")}},
        "'Keywords:' is no field: a name, a colon, a space and a text, on one line",
    ),
    "carriage return": ({"files": {"WHEEL": replace(b"\nTag: ", b"\nTag:\r ")}}, "is no field: a name, a colon"),
    "text behind WHEEL": ({"files": {"WHEEL": lambda old: old + b"Tag: py3-none-any\n"}}, "WHEEL: has a text behind"),
    "quotes in RECORD": ({"files": {"RECORD": lambda old: b'"' + old.replace(b",", b'",', 1)}}, "which is not in"),
    # of the building machine
    "path in a module": ({"files": {"mamba_ssm/new.py": b"# /home/someone/mamba\n"}}, "holds '/home/someone'"),
    "path of Windows": ({"files": {"mamba_ssm/new.py": rb"# C:\Users\me\mamba"}}, "Users"),
    "this folder": ({"files": {"mamba_ssm/new.py": f"# {ROOT}\n".encode()}}, f"holds '{ROOT}'"),
    "compiler's file": ({"files": {BUILD_INFO: info(x="tmpxft_0000a1b2_00000000-6.cudafe1.cpp")}}, "tmpxft_0000a1b2"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGERIES)
def test_forgery_is_refused_with_its_reason(real_wheel, tmp_path, case):
    options, reason = FORGERIES[case]
    problems = verify(forge(real_wheel, tmp_path, **options))
    assert any(reason in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda name: name.replace("+cpu", "+cu130"), "the file name asks for"),
        (lambda name: name.replace("manylinux_2_28_x86_64", "win_amd64"), "not py3-none-win_amd64"),
        (lambda name: name.replace("manylinux_2_28_x86_64", "any"), "its tag is py3-none-any"),
        (lambda name: name.replace("manylinux_2_28", "manylinux_2_17"), "its tag is py3-none-manylinux_2_17_x86_64"),
        (lambda name: name.replace("py3", "cp312"), "its tag is cp312"),
        (lambda name: name.replace("mamba_ssm", "mamba_sm"), "this is mamba-sm, not mamba_ssm"),
        (lambda name: name.replace("mamba_ssm", "Mamba.ssm"), "not spelt as the project's builds spell it"),
        (lambda name: name.replace("py3", "1-py3"), "not spelt as the project's builds spell it"),
        (lambda name: name.replace("py3", "py2.py3"), "not spelt as the project's builds spell it"),
        (lambda name: name.replace(".whl", ".zip"), "the file name is no wheel's"),
        (lambda name: "mamba.whl", "the file name is no wheel's"),
    ],
)
def test_renamed_wheel_is_refused(real_wheel, tmp_path, change, reason):
    renamed = tmp_path / change(real_wheel.name)
    shutil.copy(real_wheel, renamed)
    problems = verify(renamed)
    assert any(reason in problem for problem in problems), problems


@pytest.mark.parametrize("part", [0, 0.1, 0.5, 0.99, 0.9999])
def test_truncated_wheel_is_refused(real_wheel, tmp_path, part):
    data = real_wheel.read_bytes()
    cut = tmp_path / real_wheel.name
    cut.write_bytes(data[: int(len(data) * part)])
    (problem,) = verify(cut)
    assert "damaged, cut short or no zip archive" in problem


def test_missing_wheel_is_refused(tmp_path, real_wheel):
    assert "cannot be read" in verify(tmp_path / real_wheel.name)[0]
    assert "File name too long" in verify(tmp_path / f"{'x' * 300}.whl")[0]
    assert "cannot be read" in verify(tmp_path / "a\0.whl")[0]
    (tmp_path / real_wheel.name).mkdir()
    assert "cannot be read" in verify(tmp_path / real_wheel.name)[0]


def test_any_changed_byte_is_noticed_and_none_breaks_the_verifier(real_wheel, tmp_path):
    """Bytes that no reader looks at, such as a time in the directory, may stay unseen; changed contents may not."""
    data, numbers = real_wheel.read_bytes(), random.Random(0)
    with zipfile.ZipFile(real_wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(60):
        at, changed = numbers.randrange(len(data)), tmp_path / real_wheel.name
        changed.write_bytes(data[:at] + bytes([data[at] ^ (1 << numbers.randrange(8))]) + data[at + 1 :])
        if verify(changed) == []:
            with zipfile.ZipFile(changed) as archive:
                assert {name: archive.read(name) for name in archive.namelist()} == contents


def test_wheel_without_a_label_is_refused(real_wheel, tmp_path):
    """As built from an sdist; the CPU's and CUDA's would bear the same name."""
    unlabelled = {"METADATA": replace(b"+cpu\n", b"\n")}
    (problem,) = verify(forge(real_wheel, tmp_path, unlabelled, name=real_wheel.name.replace("+cpu", "")))
    assert problem.startswith("has no local label (such as +cu130)")


def test_program_prints_a_line_a_problem_and_exits_1(real_wheel, tmp_path, capsys):
    bad = forge(real_wheel, tmp_path, files={VERSION_PY: None}, careful=False)
    assert main([str(real_wheel)]) == 0
    told = f"{UNCOMPARED}: it was built outside of a git checkout and names no commit"
    lines = [f"{real_wheel}: fit to publish", f"  note: {told}", f"  note: {MACHINE_CODE}"]
    assert capsys.readouterr().out.splitlines() == lines
    assert main([str(real_wheel), str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == f"{bad}: refused"
    assert all(line.startswith("  ") for line in lines[4:])
    assert main(["--strict", str(real_wheel)]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{real_wheel}: refused", f"  {told}"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["HEAD", "no-such-branch"],
            "--allow-commits: 'no-such-branch' is no branch, tag or commit of the checkout in",
        ),
        (["no-such-branch", "--allow-commits", "HEAD"], "--allow-commits: 'no-such-branch' is no branch"),
        (["HEAD", "x.whl"], "a wheel stands where --allow-commits expects a branch or tag: name the wheels first"),
    ],
)
def test_program_names_the_branch_that_is_not_there(real_wheel, capsys, words, reason):
    with pytest.raises(SystemExit) as ended:
        main([str(real_wheel), "--allow-commits", *words])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_program_names_the_extra_that_is_missing(tmp_path):
    (tmp_path / "pefile.py").write_text("raise ModuleNotFoundError('No module named pefile', name='pefile')")
    command = [sys.executable, str(ROOT / "scripts" / "verify_wheel.py"), "x.whl"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs pefile, which is not installed here" in done.stderr
    assert done.stderr.endswith('with the file of any wheel of mamba_ssm do: pip install "WHEEL[publish]"\n')
