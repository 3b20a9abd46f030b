"""The verifier on the wheel of causal-conv1d."""

import json
import shutil
import subprocess
import zipfile

import pytest
from _helpers import wheel_forge  # first: it may skip this module

# isort: split
from _helpers import wheels
from wheel_build import finish
from wheel_check import verify
from wheel_check.source import UNCOMPARED


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheels.assemble_convolution(tmp_path_factory.mktemp("convolution"))


def forge(wheel, folder, **changes):
    """A copy with files changed: METADATA, WHEEL, SBOM, and modules; the hashes in RECORD are made anew."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = wheel.name.partition("-py3")[0] + ".dist-info"
    places = {"METADATA": f"{info}/METADATA", "WHEEL": f"{info}/WHEEL", "SBOM": f"{info}/sboms/causal_conv1d.cdx.json"}
    for name, change in changes.items():
        place = places.get(name, f"causal_conv1d/{name}.py")
        files[place] = change(files.get(place, b""))
    files[f"{info}/RECORD"] = wheel_forge.record_of(files, f"{info}/RECORD")
    finish.pack(files, target, 0)
    return target


def replace(old, new):
    def change(content):
        assert old in content
        return content.replace(old, new)

    return change


def test_what_the_project_builds_is_fit(wheel, tmp_path):
    assert verify(wheel) == []
    assert verify(forge(wheel, tmp_path)) == []
    problems, (note,) = wheel_forge.told_of(wheel)
    assert problems == [] and UNCOMPARED in note


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"METADATA": replace(b"mamba_ssm==", b"mamba_ssm>=")}, "METADATA: Requires-Dist has mamba_ssm>="),
        (
            {"METADATA": replace(b"Name: causal-conv1d", b"Name: mamba_ssm")},
            "the name is 'mamba_ssm', not 'causal-conv",
        ),
        ({"WHEEL": replace(b"Purelib: true", b"Purelib: false")}, "WHEEL: Root-Is-Purelib is false, not true"),
        ({"__init__": replace(b'"1.6.1"', b'"1.7.0"')}, "and should be 1.7.0+mamba."),
        ({"cpp_functions": lambda old: old + b"import triton\n"}, "imports triton, which mamba_ssm does not bring"),
        ({"more": lambda old: b"\n"}, "causal_conv1d/more.py: is no file of this project's wheels"),
        ({"SBOM": replace(b'"version": "1.6.1', b'"version": "1.6.2')}, "is of version 1.6.2+mamba."),
        ({"SBOM": lambda old: b"{}"}, "is no CycloneDX 1.6 document"),
    ],
)
def test_forgery_is_refused_with_its_reason(wheel, tmp_path, changes, reason):
    problems = verify(forge(wheel, tmp_path, **changes))
    assert any(reason in problem for problem in problems), problems


def test_another_tag_is_refused(wheel, tmp_path):
    renamed = tmp_path / wheel.name.replace("any", "linux_x86_64")
    shutil.copy(wheel, renamed)
    assert any("its tag is py3-none-linux_x86_64" in problem for problem in verify(renamed))


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_its_files_are_those_of_its_commit(wheel, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    shutil.copytree(wheels.ROOT / "causal-conv1d", checkout / "causal-conv1d", ignore=lambda *_: ["__pycache__"])
    shutil.copy(wheels.ROOT / "LICENSE", checkout)
    git = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]
    for words in (["init", "-q"], ["add", "."], [*git, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=checkout, check=True)
    monkeypatch.setattr("wheel_check.source.ROOT", checkout)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout

    def told(value):
        return lambda old: json.dumps(json.loads(old.replace(b'"unknown"', json.dumps(value).encode()))).encode()

    named = {"SBOM": told(head.strip())}
    assert wheel_forge.told_of(forge(wheel, tmp_path, **named)) == ([], [])
    (problem,), _ = wheel_forge.told_of(forge(wheel, tmp_path, **named, cpp_functions=lambda old: old + b"# more\n"))
    assert problem.startswith("causal_conv1d/cpp_functions.py: not as in commit")
    (problem,), _ = wheel_forge.told_of(forge(wheel, tmp_path, SBOM=told(f"{head.strip()} with changes")))
    assert "and changes to it" in problem
