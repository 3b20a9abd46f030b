"""GitHub's workflows: they type what README and docs tell people to type, and actionlint takes them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path):
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job.get("steps", ())


def commands(workflow: Path) -> str:
    return "\n".join(step["run"] for step in steps(workflow) if "run" in step)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def test_there_are_workflows():
    assert [path.name for path in WORKFLOWS] == ["release.yml", "test.yml", "windows.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_they_run_is_in_the_repository(workflow):
    named = re.findall(r"(?:\.ci|scripts)[/\\][\w./\\]+|setup\.py", commands(workflow))
    missing = [name for name in named if not (ROOT / name.replace("\\", "/")).is_file()]
    assert named or workflow.name == "test.yml"
    assert not missing


def test_windows_is_built_as_the_page_says():
    """A line of the page may have a file for its output after it in the workflow."""
    build = next(block for block in blocks("docs/windows.md", "powershell") if "bdist_wheel" in block)
    typed = [line.split(" | Tee-Object")[0] for line in commands(ROOT / ".github/workflows/windows.yml").splitlines()]
    assert [line for line in build.splitlines() if line not in typed] == []


def test_a_release_is_built_as_the_page_says():
    page = "\n".join(blocks("docs/publishing.md", "bash"))
    for command in (
        "python setup.py bdist_wheel",
        "python scripts/verify_wheel.py dist/*.whl",
        "python scripts/publish.py dist/*.whl",
    ):
        assert command in page
        assert command in commands(ROOT / ".github/workflows/release.yml")


def test_a_release_is_strict_and_of_what_was_tagged():
    """Another branch's wheel does not get out, whoever put it among the artifacts."""
    run = commands(ROOT / ".github/workflows/release.yml")
    (publish,) = re.findall(r"scripts/publish\.py.*", run)
    assert "--allow-commits HEAD" in publish and "--no-strict" not in publish
    (verify,) = re.findall(r"scripts/verify_wheel\.py.*", run)
    assert "--strict" in verify
    checkouts = [step for step in steps(ROOT / ".github/workflows/release.yml") if "checkout" in step.get("uses", "")]
    assert checkouts and all(step["with"]["fetch-depth"] == 0 for step in checkouts), "strict needs the commits"


def test_actionlint():
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed")
    result = subprocess.run([program, *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
