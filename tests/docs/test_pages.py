"""The pages that people read: every block of code runs as typed, every link leads somewhere."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _helpers import programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for pattern in ("*.md", "causal-conv1d/*.md", "docs/**/*.md", "csrc/**/*.md") for page in ROOT.glob(pattern)
)
# Three backticks and a language, perhaps indented in a list, perhaps after a line that says what the block needs.
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]+) -->\n)?(?P<indent> *)```(?P<language>\S*)\n(?P<code>.*?)^ *```$", re.M | re.S
)


def relative(page):
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of code
    needs: str | None
    code: str


def blocks(language):
    """Parameters, one for each block of this language."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            if fence["language"] == language:
                line = text.count("\n", 0, fence.start("code")) + 1
                code = re.sub(f"^{fence['indent']}", "", fence["code"], flags=re.M)
                found.append(pytest.param(Block(page, line, fence["needs"], code), id=f"{relative(page)}:{line}"))
    return found


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs_as_typed(block, tmp_path):
    """Alone, in an empty folder; a block that is for both devices takes the GPU by itself where there is one."""
    ranks = 0
    if processes := re.fullmatch(r"torchrun, (\d) processes", block.needs or ""):
        if not (dist.is_available() and dist.is_gloo_available()):
            pytest.skip("this torch is built without gloo")
        ranks = int(processes[1])
    elif oldest := re.fullmatch(r"torch (\d+)\.(\d+)((?:, \w+)*)", block.needs or ""):
        if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < tuple(map(int, oldest.groups()[:2])):
            pytest.skip(f"needs {block.needs}, and this is {torch.__version__}")
        for package in re.findall(r"\w+", oldest[3]):
            pytest.importorskip(package)
    elif package := re.fullmatch(r"the package (\w+)", block.needs or ""):
        pytest.importorskip(package[1])
    elif block.needs and not (block.needs == "CUDA" and torch.cuda.is_available()):
        pytest.skip(f"needs {block.needs}")
    script = tmp_path / f"{block.page.stem}_md.py"  # onnx.py would be in the way of the package
    script.write_text("\n" * (block.line - 1) + block.code, encoding="utf-8")  # a traceback names the page's line
    if ranks:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # there may be one GPU for all
        done = programs.run_ranks(script, ranks, cwd=tmp_path, environ=environ)
    else:
        done = [programs.run_script(script, cwd=tmp_path)]
    assert [each.returncode for each in done] == [0] * len(done), [each.stderr for each in done]


@pytest.mark.parametrize("block", blocks("bash"))
def test_bash_reads_it(block):
    """.ci/run runs those that a marker names; the others are too large or need what a test does not have."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on PATH")
    done = subprocess.run([bash, "-n"], input=block.code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("bash") + blocks("powershell"))
def test_scripts_of_a_shell_block_exist(block):
    missing = [
        path
        for path in re.findall(r"(?<![\w./-])(?:scripts|examples)/[\w/.]+", block.code)
        if not (ROOT / path).exists()
    ]
    assert not missing


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_parses(block):
    import tomllib

    assert tomllib.loads(block.code)


# ---- links -----------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def prose(page):
    """A page without its code, where brackets are no links and # is no heading."""
    return re.sub(r"`[^`\n]*`", "code", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page):
    """What code hosts make of a page's headings: lower case, no punctuation, hyphens for spaces, repeats numbered."""
    found = []
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


@pytest.mark.parametrize("page", [pytest.param(page, id=relative(page)) for page in PAGES])
def test_links(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"\w+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target}: there is no {path}"
        assert goal.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert not anchor or anchor in anchors(goal), f"{target}: {relative(goal)} has {', '.join(anchors(goal))}"
