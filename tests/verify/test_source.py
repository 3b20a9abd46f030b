"""The wheel's files are those of the commit that it names, whatever its RECORD says."""

import shutil

import pytest
from _helpers.checkouts import git
from _helpers.wheel_forge import BUILD_INFO  # first: it may skip this module

# isort: split
from wheel_check.source import UNCOMPARED, UnknownRef

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="no git here")]
INIT, NEW, LICENSE = "mamba_ssm/__init__.py", "mamba_ssm/new.py", "licenses/LICENSE"


def test_wheel_of_its_commit_is_fit(forged):
    assert forged() == ([], [])


def test_wheel_of_a_checkout_on_windows_is_fit(forged):
    assert forged({INIT: lambda old: old.replace(b"\n", b"\r\n")}) == ([], [])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({INIT: lambda old: old + b"import os\n"}, f"{INIT}: not as in commit"),
        ({NEW: b"import os\n"}, f"{NEW}: not in commit"),
        ({"mamba_ssm/ops/streaming.py": None}, "mamba_ssm/ops/streaming.py: missing here, but in commit"),
    ],
)
def test_edited_wheel_is_refused(forged, files, reason):
    (problem,), notes = forged(files)
    assert problem.startswith(reason) and problem.endswith(", which the wheel says it was built from")
    assert notes == []


def test_other_license_is_refused(forged, real_wheel):
    version = real_wheel.name.split("-")[1]
    (problem,), _ = forged({f"mamba_ssm-{version}.dist-info/{LICENSE}": b"All rights reserved\n"})
    assert f"{LICENSE}: not as in commit" in problem


@pytest.mark.parametrize(
    ("old", "new", "added", "gone"),
    [
        ("torch>=2.2", "torch", "Requires-Dist: torch", "Requires-Dist: torch>=2.2"),
        ("huggingface_hub>=", "evilpkg>=", 'evilpkg>=0.20; extra == "hub"', 'huggingface-hub>=0.20; extra == "hub"'),
        ('numpy; extra == "test"', 'numpy; extra == "hub"', 'numpy; extra == "hub"', 'numpy; extra == "test"'),
        ("Provides-Extra: hub", "Provides-Extra: all", "Provides-Extra: all", "Provides-Extra: hub"),
        ('\nRequires-Dist: zstandard; extra == "publish"', "", None, 'zstandard; extra == "publish"'),
        ("\nRequires-Dist: torch", "\nRequires-Dist: torch<2.3\nRequires-Dist: torch", "torch<2.3", None),
    ],
)
def test_other_requirements_are_refused(forged, old, new, added, gone):
    def edit(metadata):
        assert metadata.count(old.encode()) == 1
        return metadata.replace(old.encode(), new.encode())

    problems, _ = forged({"METADATA": edit})
    reasons = [
        (added, "in METADATA, but not in pyproject.toml of"),
        (gone, "not in METADATA, but in pyproject.toml of"),
    ]
    reasons = [f"{line}: {reason} commit " for line, reason in reasons if line]
    assert len(problems) == len(reasons)
    assert all(reason in problem for reason, problem in zip(reasons, problems, strict=True))


def test_requirements_may_be_spelt_otherwise(forged):
    assert forged({"METADATA": lambda old: old.replace(b"huggingface_hub>=0.20;", b"Huggingface.Hub >= 0.20 ;")}) == (
        [],
        [],
    )


def test_many_files_are_one_line(forged):
    (problem,), _ = forged({f"mamba_ssm/new{number}.py": b"" for number in range(7)})
    assert problem.startswith("mamba_ssm/new0.py, mamba_ssm/new1.py") and " and 2 more: not in commit" in problem


def test_changed_tree_is_refused(forged):
    (problem,), _ = forged(source_dirty=True)
    assert "commit the changes, then build" in problem


def test_commit_that_is_none_is_refused(forged):
    assert forged(source_commit="--help")[0] == [f"{BUILD_INFO}: source_commit is '--help', which is no commit"]


def test_nothing_to_compare_with_is_a_note(forged, monkeypatch, tmp_path):
    problems, (note,) = forged(source_commit=None)
    assert problems == [] and note.startswith(UNCOMPARED)
    problems, (note,) = forged(source_commit="a" * 40)
    assert (
        problems == []
        and note == f"{UNCOMPARED}: commit {'a' * 40} is not in this checkout; fetch it, or verify where it is"
    )
    monkeypatch.setattr("wheel_check.source.ROOT", tmp_path)  # an unpacked sdist
    assert "is not in this checkout" in forged()[1][0]
    monkeypatch.setenv("PATH", "")
    assert "is not in this checkout" in forged()[1][0]


# ---- which commits may be published ----------------------------------------------------------------------------------


def test_commit_of_an_allowed_branch_is_fit(forged, checkout):
    git(checkout, "tag", "-f", "v1")
    assert forged(allow_commits=["HEAD"]) == ([], [])
    assert forged(allow_commits=["v1"]) == ([], [])


def test_commit_of_no_allowed_branch_is_refused(forged, checkout):
    """A branch that begins before the commit, and one that shares nothing with it."""
    empty = git(checkout, "hash-object", "-t", "tree", "/dev/null")
    git(checkout, "branch", "-f", "others", git(checkout, "commit-tree", empty, "-m", "other"))
    head = git(checkout, "rev-parse", "HEAD")
    (problem,), _ = forged(allow_commits=["others"])
    assert problem == f"only commits of others may be published, and its commit {head} is not among them"
    assert forged(allow_commits=["others", "HEAD"]) == ([], [])
    (problem,), _ = forged(allow_commits=["HEAD"], source_commit=None)
    assert problem == "only commits of HEAD may be published, and it names no commit"
    (problem,), _ = forged(allow_commits=["HEAD"], source_commit="a" * 40)
    assert "is not among them" in problem


@pytest.mark.parametrize("ref", ["no-such-branch", "--help", "-h", "", "HEAD..HEAD", "a b"])
def test_ref_that_is_not_there_is_named(forged, ref):
    with pytest.raises(UnknownRef, match="is no branch, tag or commit of the checkout") as caught:
        forged(allow_commits=["HEAD", ref])
    assert str(caught.value).startswith(repr(ref))


def test_tree_is_no_commit(forged, checkout):
    """git lists the files of a tree as it lists a commit's, and anybody can write one."""
    problems, (note,) = forged(source_commit=git(checkout, "rev-parse", "HEAD^{tree}"))
    assert problems == [] and "is not in this checkout" in note
