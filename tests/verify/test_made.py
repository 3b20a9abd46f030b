"""Texts that are not what the build makes of the wheel's commit: refused with strict, a note each without."""

import json
import re
import shutil

import pytest
from _helpers.wheel_forge import BUILD_INFO  # first: it may skip this module

# isort: split
from _helpers.checkouts import commit_of_this_tree, git

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="no git here")]


def replace(old, new):
    def change(content):
        assert content.count(old.encode()) == 1
        return content.replace(old.encode(), new.encode())

    return change


def more(line):
    """A further field of METADATA or WHEEL."""
    return lambda old: re.sub(rb"\n(?=Requires-Python|Root-Is)", f"\n{line}\n".encode(), old, count=1)


def sbom(change):
    def edit(content):
        document = json.loads(content)
        change(document)
        return (json.dumps(document, indent=2) + "\n").encode()

    return edit


def of_component(**fields):
    return sbom(lambda document: document["metadata"]["component"].update(fields))


LICENSE = [{"license": {"id": "MIT"}}]
LIBRARY = {"type": "library", "name": "openssl", "version": "3"}
TOOLS = {"components": [{"type": "application", "name": "GNU", "version": "1"}]}
SAID = "which no build of this project writes"

# What is changed, a file or a field of build_info.json -> what is said.
CHANGES = {
    # METADATA
    "summary": ({"METADATA": replace("Summary: Mamba", "Summary: Best Mamba")}, "METADATA: Summary is Best Mamba"),
    "license": ({"METADATA": replace("Expression: Apache-2.0", "Expression: MIT")}, "License-Expression is MIT, and"),
    "second license": ({"METADATA": more("License: MIT")}, "METADATA: License is MIT, and commit"),
    "URL": ({"METADATA": more("Project-URL: Homepage, https://evil.example")}, "Project-URL is Homepage, https://evil"),
    "home page": ({"METADATA": more("Home-page: https://evil.example")}, "METADATA: Home-page is https://evil.example"),
    "download": ({"METADATA": more("Download-URL: https://evil.example")}, "METADATA: Download-URL is https://evil"),
    "author": ({"METADATA": more("Author: Somebody")}, "METADATA: Author is Somebody, and commit"),
    "mail": ({"METADATA": more("Author-email: a@evil.example")}, "METADATA: Author-email is a@evil.example, and"),
    "classifier": ({"METADATA": more("Classifier: Topic :: Games")}, "METADATA: Classifier is"),
    "keywords": ({"METADATA": replace("mamba,state space", "mamba,best,state space")}, "METADATA: Keywords is"),
    "Provides-Dist": ({"METADATA": more("Provides-Dist: torch")}, "METADATA: Provides-Dist is torch, and commit"),
    "Obsoletes-Dist": ({"METADATA": more("Obsoletes-Dist: torch")}, "METADATA: Obsoletes-Dist is torch, and commit"),
    "Requires-External": ({"METADATA": more("Requires-External: libevil")}, "Requires-External is libevil, and"),
    "Dynamic": ({"METADATA": replace("Dynamic: license-file", "Dynamic: requires-dist")}, "Dynamic is requires-dist"),
    "Platform": ({"METADATA": more("Platform: any")}, "METADATA: Platform is any, and commit"),
    "content type": ({"METADATA": replace("text/markdown", "text/x-rst")}, "Description-Content-Type is text/x-rst"),
    "description": ({"METADATA": lambda old: old + b"and more\n"}, "the description is not the readme of commit"),
    "a field gone": ({"METADATA": replace("License-File: LICENSE\n", "")}, "METADATA: License-File is missing, and"),
    # WHEEL
    "build number": ({"WHEEL": more("Build: 1")}, f"WHEEL: has Build: 1, {SAID}"),
    "another field": ({"WHEEL": more("Install-Paths-To: /etc")}, f"WHEEL: has Install-Paths-To: /etc, {SAID}"),
    "another builder": ({"WHEEL": lambda old: re.sub(rb"setuptools \(.*\)", b"flit 3", old)}, "Generator is flit 3"),
    "no builder": ({"WHEEL": lambda old: re.sub(rb"Generator: .*\n", b"", old)}, "WHEEL: Generator is missing"),
    # the bill of materials
    "purl": ({"SBOM": of_component(purl="pkg:pypi/torch@2")}, "build_info.json: metadata.component.purl"),
    "license there": ({"SBOM": of_component(licenses=LICENSE)}, "metadata.component.licenses"),
    "component": ({"SBOM": sbom(lambda it: it["components"].append(LIBRARY))}, "build_info.json: components"),
    "tool": ({"SBOM": sbom(lambda it: it["metadata"].update(tools=TOOLS))}, "metadata.tools.components"),
    "number": ({"SBOM": sbom(lambda it: it.update(version=2))}, "build_info.json: version"),
    "other commit": ({"SBOM": of_component(properties=[])}, "metadata.component.properties"),
    "white space": ({"SBOM": lambda old: old + b"\n"}, "build_info.json: order or white space"),
    # build_info.json
    "unknown field": ({"built_by": "me"}, "not spelt as the build spells them: built_by"),
    "field twice": ({BUILD_INFO: replace('"debug": false,', '"debug": true,\n  "debug": false,')}, "or a name twice"),
    "compiler": ({"host_compiler": "me"}, f'host_compiler is "me", {SAID}'),
    "linker": ({"linker": None}, f"linker is null, {SAID}"),
    "glibc": ({"glibc": "2.17"}, f'glibc is "2.17", {SAID}'),
    "nvcc": ({"nvcc_version": "13.0.88"}, f'nvcc_version is "13.0.88", {SAID}'),
    "cross-built": ({"cross_built": {"on": "Linux", "mamba_cpu": "GNU 12", "mingw_w64": "10"}}, "cross_built is"),
    "dtypes": ({"dtypes": ["float64"]}, "dtypes is"),
    "flags": ({"flags": "-O3"}, f'flags is "-O3", {SAID}'),
    "number for a name": ({"debug": 0}, f"debug is 0, {SAID}"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_change_is_noted_and_refused_by_strict(forged, case):
    change, reason = CHANGES[case]
    files = {name: edit for name, edit in change.items() if callable(edit)}
    facts = {name: value for name, value in change.items() if name not in files}
    problems, (note,) = forged(files, **facts)
    assert problems == [] and reason in note
    assert forged(files, strict=True, **facts) == ([note], [])


def test_what_the_project_builds_of_a_commit_is_fit(forged, real_wheel, cuda_wheel, windows_wheel):
    for wheel in (real_wheel, cuda_wheel, windows_wheel):
        assert forged(wheel=wheel, strict=True) == ([], [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"Metadata-Version: 2.\d", "Metadata-Version: 2.5"),  # as newer versions of setuptools may write
        ("(Requires-Python: .*\n)((?:.*\n)*)(License-File: .*\n)", r"\3\2\1"),
        ("Dynamic: license-file\n", ""),
        ("huggingface_hub", "huggingface-hub"),
        ("\n", "\r\n"),  # as on Windows
    ],
)
def test_metadata_of_another_setuptools_is_fit(forged, old, new):
    def edit(metadata):
        changed = re.sub(old, new, metadata.decode()).encode()
        assert changed != metadata
        return changed

    assert forged({"METADATA": edit}, strict=True) == ([], [])


def test_commit_whose_builder_is_another_is_said(forged, tmp_path, monkeypatch):
    other = commit_of_this_tree(tmp_path / "other")
    with open(other / "scripts" / "wheel_build" / "sbom.py", "a", encoding="utf-8") as script:
        script.write("# more\n")
    git(other, "commit", "-qam", "two")
    monkeypatch.setattr("wheel_check.source.ROOT", other)
    problems, (note,) = forged(source_commit=git(other, "rev-parse", "HEAD"))
    assert problems == [] and "with another scripts/wheel_build/sbom.py than this checkout's" in note
