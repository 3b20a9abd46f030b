"""The index's pages: HTML (PEP 503) and JSON (PEP 691, 700), and one for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import jinja2
from packaging.version import Version

from .files import CONVOLUTION_PROJECT, PROJECT, File

FILES, EVERYTHING, OVERVIEW = "files", "all", "index.html"


def offered(files: Iterable[File]) -> list[File]:
    """What people are told to install: the files that are not yanked."""
    return [file for file in files if not file.yanked]


def requirements(files: list[File]) -> list[str]:
    """A line of requirements.txt for each version, with the hash of every file of it."""
    return [
        f"{files[0].project}=={version}"
        + "".join(f" \\\n    --hash=sha256:{file.sha256}" for file in files if file.version == version)
        for version in dict.fromkeys(file.version for file in files)
    ]


def project_json(project: str, files: Iterable[File]) -> dict:
    """PEP 691 with the fields of PEP 700."""
    entries = [
        {
            "filename": file.name,
            "url": f"../../{FILES}/{quote(file.name)}",
            "hashes": {"sha256": file.sha256},
            "requires-python": file.requires_python,
            "core-metadata": {"sha256": file.metadata_sha256},
            "size": file.size,
            "upload-time": file.uploaded,
            **({"yanked": file.yanked} if file.yanked else {}),
        }
        for file in files
    ]
    versions = list(dict.fromkeys(str(file.version) for file in files))
    return {"meta": {"api-version": "1.1"}, "name": project, "versions": versions, "files": entries}


def root_json(projects: Iterable[str]) -> dict:
    return {"meta": {"api-version": "1.1"}, "projects": [{"name": project} for project in projects]}


def pages(files: list[File]) -> Iterator[tuple[str, bytes]]:
    """(path in the site, contents) of every page, in an order in which each only names what is there already."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"url": quote, "offered": offered}
    convolutions = [file for file in files if file.project == CONVOLUTION_PROJECT]
    libraries = [file for file in files if file.project == PROJECT]
    # In pip's own order, the newest CUDA first.
    names = sorted({file.label for file in libraries}, key=lambda label: Version(f"0+{label}"), reverse=True)
    labels = {label: [file for file in libraries if file.label == label] for label in names}
    values = {"folder": FILES, "everything": EVERYTHING, "convolution": CONVOLUTION_PROJECT}
    for index, held in {EVERYTHING: libraries, **labels}.items():
        projects = {project: of for project, of in ((PROJECT, held), (CONVOLUTION_PROJECT, convolutions)) if of}
        folders = [
            (f"{index}/{project}", "project.html", project_json(project, of), {"project": project, "files": of})
            for project, of in projects.items()
        ]
        for folder, page, content, more in [*folders, (index, "root.html", root_json(projects), {})]:
            pins = requirements(offered(more["files"])) if more else []
            page_values = {**values, **more, "index": index, "projects": projects, "pins": pins}
            yield f"{folder}/index.html", environment.get_template(page).render(page_values).encode()
            yield f"{folder}/index.json", (json.dumps(content, indent=1) + "\n").encode()
    values |= {"project": PROJECT, "labels": labels, "files": libraries, "convolutions": convolutions}
    yield OVERVIEW, environment.get_template("overview.html").render(values).encode()
