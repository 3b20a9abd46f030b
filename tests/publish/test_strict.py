"""Strict: which commits a wheel may be of to be published."""

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
from _helpers.checkouts import git
from wheel_build import convolution

CODE = "causal_conv1d/__init__.py"


def test_wheel_of_its_commit_is_published(committed, gate):
    gate.accepts(committed)


def test_unknown_commit(committed, gate, monkeypatch, tmp_path):
    monkeypatch.setattr("wheel_check.source.ROOT", tmp_path)
    for printed in gate.refuses(committed):
        assert "is not in this checkout" in printed
    for printed in gate.accepts(committed, "--no-strict"):
        assert "note" in printed and "is not in this checkout" in printed


def test_tree_that_had_changes(checkout, gate, tmp_path):
    (checkout / "causal-conv1d" / "src" / CODE).open("a").write("# not committed\n")
    (tmp_path / "dist").mkdir()
    made = convolution.build(checkout, tmp_path / "dist", None)
    for options in ([], ["--no-strict"]):
        for printed in gate.refuses(made, *options):
            assert "commit the changes, then build" in printed


def test_commits_that_may_be_published(checkout, gate, tmp_path):
    """A wheel of a branch that nobody reviewed, and what was tagged before it."""
    git(checkout, "tag", "v1")
    git(checkout, "switch", "--quiet", "--create", "experiment")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=two")
    (tmp_path / "dist").mkdir()
    made = convolution.build(checkout, tmp_path / "dist", None)
    commit = git(checkout, "rev-parse", "HEAD")
    for printed in gate.refuses(made, "--allow-commits", "main", "v1"):
        assert f"only commits of main and v1 may be published, and its commit {commit}" in printed
    gate.accepts(made, "--allow-commits", "v1", "experiment")


def test_branch_that_is_not_there(committed, publish, gate, tmp_path):
    status, printed = publish(committed, "--repository-url", "https://pypi.example.com", "--allow-commits", "releases")
    assert status == 1 and "--allow-commits: 'releases' is no branch, tag or commit" in printed
    status, printed = gate.index(committed.parent, "--allow-commits", "releases")
    assert status == 1 and "--allow-commits: 'releases' is no branch, tag or commit" in printed


def test_options_that_do_not_go_together(committed, publish, capsys):
    for words, reason in (
        (["--signed-by", "A" * 40], "name its folder with --signatures"),
        (["--allow-commits", "main", str(committed)], "name the wheels first"),
    ):
        with pytest.raises(SystemExit):
            publish(committed, *words)
        assert reason in capsys.readouterr().err
