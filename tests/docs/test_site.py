"""The docs as a site: mkdocs builds it without a warning, its links lead to its own files, it loads nothing else."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs", reason="mkdocs (extra publish) is not installed")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "packaging" / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    command += ["-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(CONFIG), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site):
    return {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html")) if page.name != "404.html"}


def test_links_lead_to_files_of_the_site(site):
    assert (site / "csrc" / "index.html").is_file() and (site / "CONTRIBUTING" / "index.html").is_file()
    for page, text in pages(site).items():
        for target in re.findall(r'(?:href|src)="([^"#?]+)', text):
            if re.match(r"\w+:", target):
                continue
            goal = (page.parent / unquote(target)).resolve()
            assert goal.is_relative_to(site.resolve()), f"{page}: {target}"
            assert goal.is_file() or (goal / "index.html").is_file(), f"{page}: {target}"


def test_blocks_are_code_and_lists_are_lists(site):
    for page, text in pages(site).items():
        assert "```" not in text, page
    nested = (site / "docs" / "distributed" / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<ul>\s*<li>Parameters that all heads share", nested)


def test_a_visitor_loads_nothing_from_other_hosts(site):
    for page, text in pages(site).items():
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="(\w*:?//[^"]+)', text)
        loaded += re.findall(r'<link\b[^>]*rel="stylesheet"[^>]*href="(\w*:?//[^"]+)', text)
        assert not loaded, page


def test_every_page_for_people_is_in_the_navigation():
    def paths(entries):
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from paths(value) if isinstance(value, list) else [value]

    found = list(paths(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"]))
    expected = {page.relative_to(ROOT).as_posix() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    assert expected | {"causal-conv1d/README.md"} == set(found) and len(found) == len(set(found))
