"""The verifier on the wheel of causal-conv1d."""

import json
import shutil
import zipfile

import pytest
from _helpers import wheel_forge  # first: it may skip this module

# isort: split
from _helpers import wheels
from _helpers.checkouts import git
from wheel_build import finish, sbom
from wheel_check import limits, verify, verify_to_publish
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
    places["top_level"] = f"{info}/top_level.txt"
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
    verdict = verify_to_publish(wheel)
    assert verdict.problems == [] and len(verdict.notes) == 1 and UNCOMPARED in verdict.notes[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"METADATA": replace(b"mamba_ssm==", b"mamba_ssm>=")}, "METADATA: Requires-Dist has mamba_ssm>="),
        (
            {"METADATA": replace(b"Name: causal-conv1d", b"Name: mamba_ssm")},
            "the name is 'mamba_ssm', not 'causal-conv",
        ),
        ({"WHEEL": replace(b"Purelib: true", b"Purelib: false")}, "WHEEL: Root-Is-Purelib is false, not true"),
        ({"__init__": replace(b'"1.7.0"', b'"1.7.1"')}, "and should be 1.7.1+mamba."),
        ({"cpp_functions": lambda old: old + b"import triton\n"}, "imports triton, which mamba_ssm does not bring"),
        ({"more": lambda old: b"\n"}, "causal_conv1d/more.py: is no file of this project's wheels"),
        ({"SBOM": replace(b'"version": "1.7.0', b'"version": "1.7.1')}, "is of version 1.7.1+mamba."),
        ({"SBOM": lambda old: b"{}"}, "is no CycloneDX 1.6 document"),
        ({"SBOM": lambda old: old + b" " * limits.SBOM}, "bytes, and may have 16384"),
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
def test_its_files_are_those_of_its_commit(wheel, checkout, tmp_path, monkeypatch):
    monkeypatch.setattr("wheel_check.source.ROOT", checkout)
    head = git(checkout, "rev-parse", "HEAD")

    def told(commit, changed=False):
        return lambda old: sbom.document("causal_conv1d", wheel.name.split("-")[1], commit, changed).encode()

    def said(strict=False, **changes):
        verdict = verify_to_publish(forge(wheel, tmp_path, **{"SBOM": told(head), **changes}), strict=strict)
        return verdict.problems, verdict.notes

    assert said(strict=True) == ([], [])
    (problem,), _ = said(cpp_functions=lambda old: old + b"# more\n")
    assert problem.startswith("causal_conv1d/cpp_functions.py: not as in commit")
    (problem,), _ = said(SBOM=told(head, changed=True))
    assert "and changes to it" in problem
    for changes, reason in (
        (
            {"METADATA": replace(b"Summary: causal", b"Summary: best causal")},
            f"METADATA: is not what commit {head} makes",
        ),
        ({"WHEEL": replace(b"Root-Is", b"Build: 1\nRoot-Is")}, "WHEEL: has Build: 1"),
        ({"SBOM": lambda old: told(head)(old).replace(b"Apache-2.0", b"MIT")}, "metadata.component.licenses[0]"),
    ):
        problems, (note,) = said(**changes)
        assert problems == [] and reason in note
        assert said(strict=True, **changes) == ([note], [])


@pytest.mark.parametrize("properties", [None, [], [{"name": "a"}], [{"name": "a", "value": "b"}] * 2])
def test_bill_of_materials_that_names_no_commit(wheel, tmp_path, properties):
    def edit(old):
        document = json.loads(old)
        document["metadata"]["component"].pop("properties")
        if properties is not None:
            document["metadata"]["component"]["properties"] = properties
        return json.dumps(document).encode()

    verdict = verify_to_publish(forge(wheel, tmp_path, SBOM=edit), allow_commits=["HEAD"])
    (problem,) = verdict.problems
    assert problem.startswith("its source cannot be read: ")


def test_a_member_that_belongs_to_no_one_is_the_builds(wheel, tmp_path):
    (problem,) = verify(forge(wheel, tmp_path, top_level=lambda old: b"torch\n"))
    assert "top_level.txt: holds b'torch\\n', and the build writes 'causal_conv1d\\ncausal_conv1d_cuda\\n'" in problem


def test_archive_of_a_megabyte_is_refused(wheel, tmp_path):
    large = tmp_path / wheel.name
    large.write_bytes(bytes(1 << 20))
    (problem,) = verify(large)
    assert "and no wheel of this project has so many" in problem
