"""For mkdocs.yml: pages of all folders, under their paths in the repository, and anchors as code hosts make them."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
PAGES = "*.md", "docs/*.md", "causal-conv1d/*.md", "csrc/**/*.md"
FILES = "LICENSE", "docs/*.svg", "examples/*.py", "tests/compat/names.txt"  # what pages show or link to
BESIDE = "csrc/"  # its pages lead to each other, too many for the navigation


def on_config(config):
    config.mdx_configs["toc"] = {"slugify": slug, "permalink": True}
    return config


def on_files(files, config):
    pages = sorted({path for pattern in (*PAGES, *FILES) for path in ROOT.glob(pattern)})
    found = [_file(path.relative_to(ROOT).as_posix(), config) for path in pages]
    return Files([file for file in files if not file.src_uri.endswith((".md", ".svg"))] + found)


def _file(path, config):
    file = File(path, str(ROOT), config.site_dir, config.use_directory_urls)
    if path.startswith(BESIDE):
        file.inclusion = InclusionLevel.NOT_IN_NAV
    return file


def slug(heading, separator):
    """Anchors as code hosts make them, which the pages' links are written for."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)
