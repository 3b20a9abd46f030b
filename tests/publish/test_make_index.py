"""The static index: what its pages say, what it refuses, and that it never breaks what is published."""

import hashlib
import json
import re
import shutil
import zipfile
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import filelock
import make_index
import pytest
import requests
from _helpers import wheels
from _helpers.servers import StaticSite
from pypi_simple import ACCEPT_HTML_ONLY, ACCEPT_JSON_ONLY, PyPISimple
from static_index import files as files_of_an_index
from wheel_check import Verdict
from wheel_check.wheel import read_wheel

CUDA_13 = {
    "cuda": True,
    "nvcc_version": "13.0.88",
    "architectures": ["75-real", "80-real", "86-real", "89-real", "90-real", "100-real", "120-real", "120-virtual"],
}
# PTX for 9.0a runs on no newer GPU.
CUDA_12 = {"cuda": True, "nvcc_version": "12.9.86", "architectures": ["75-real", "90a-real", "90a-virtual"]}


@pytest.fixture(scope="module")
def two_labels(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    for label in ("cpu", "cpu.other"):
        wheels.repack(wheel, folder, label=label)
    return folder


@pytest.fixture
def dist(two_labels, tmp_path):
    """A folder of two wheels: one of each label."""
    return shutil.copytree(two_labels, tmp_path / "dist")


@pytest.fixture
def run(dist, tmp_path, capsys):
    """run() -> (exit status, everything printed); adds the wheels of `dist` to the folder site.

    They are of this tree as it is, which no commit holds. What strict refuses is in test_strict.py.
    """

    def call(wheels=dist, site=tmp_path / "site"):
        status = make_index.main([str(wheels), str(site), "--no-strict"])
        return status, "".join(capsys.readouterr())

    return call


@pytest.fixture
def anything_goes(monkeypatch):
    """For wheels that could not be real, or where verifying takes time and is not the point."""
    monkeypatch.setattr("wheel_gate.verify_to_publish", lambda path, **_: Verdict([], [], read_wheel(path)))


def snapshot(site):
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def pages(files):
    return {name for name in files if not name.startswith((".", "files/"))}


class Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "a":
            self.found.append(dict(attributes))


def test_folders_and_links(run, dist, tmp_path):
    assert run()[0] == 0
    files = snapshot(tmp_path / "site")
    expected = {"index.html", "yanked.txt"}
    for index in ("all", "cpu", "cpu.other"):
        expected |= {f"{index}/{page}" for page in ("index.html", "index.json")}
        expected |= {f"{index}/mamba-ssm/{page}" for page in ("index.html", "index.json")}
    assert pages(files) == expected
    names = {path.name for path in dist.iterdir()}
    assert {name for name in files if name.startswith("files/")} == {
        f"files/{name}{suffix}" for name in names for suffix in ("", ".metadata")
    }
    for name in pages(files):
        if name.endswith(".html"):
            for link in Links(files[name].decode()).found:
                target = unquote(urldefrag(urljoin(f"/{name}", link["href"])).url).lstrip("/")
                assert target in files or f"{target}index.html" in files, (name, link)
    # PEP 503: a file, an anchor, and no other.
    for index, held in {"all": 2, "cpu": 1, "cpu.other": 1}.items():
        assert len(Links(files[f"{index}/mamba-ssm/index.html"].decode()).found) == held
        assert [link["href"] for link in Links(files[f"{index}/index.html"].decode()).found] == ["mamba-ssm/"]


def test_html_and_json_agree_and_are_true(run, dist, tmp_path, anything_goes):
    """Read by an independent implementation of both."""
    assert run()[0] == 0
    with StaticSite(tmp_path / "site", negotiate=True) as site:
        for index in ("all", "cpu", "cpu.other"):
            forms = []
            for accept in (ACCEPT_HTML_ONLY, ACCEPT_JSON_ONLY):
                with PyPISimple(f"{site.url}{index}", accept=accept) as client:
                    assert client.get_index_page().projects == ["mamba-ssm"]
                    page = client.get_project_page("mamba-ssm")
                    forms.append({package.filename: package for package in page.packages})
            html, as_json = forms
            assert set(html) == set(as_json) == {path.name for path in dist.iterdir()} & set(html)
            for name, package in as_json.items():
                assert html[name].url.partition("#")[0] == package.url
                assert html[name].digests == package.digests
                assert html[name].requires_python == package.requires_python == ">=3.10"
                assert html[name].metadata_digests == package.metadata_digests
                data = requests.get(package.url, timeout=60).content
                assert data == (dist / name).read_bytes()
                assert package.digests == {"sha256": hashlib.sha256(data).hexdigest()}
                assert package.size == len(data)
                assert package.upload_time is not None
                metadata = requests.get(package.metadata_url, timeout=60).content
                assert package.metadata_digests == {"sha256": hashlib.sha256(metadata).hexdigest()}
                with zipfile.ZipFile(dist / name) as archive:
                    assert metadata == archive.read(f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA")
            assert page.versions == sorted({package.version for package in as_json.values()}, reverse=True)


def test_the_convolution_is_in_every_index(run, dist, convolution, tmp_path):
    """It came later, has a record of its own, and leaves the pages of the labels as they were."""
    assert run()[0] == 0
    site = tmp_path / "site"
    before = snapshot(site)
    shutil.copy(convolution, dist)
    status, printed = run()
    assert status == 0 and f"added      {convolution.name}" in printed
    after = snapshot(site)
    for index in ("all", "cpu", "cpu.other"):
        pages = [f"{index}/mamba-ssm/{page}" for page in ("index.html", "index.json")]
        assert all(before[page] == after[page] for page in pages)
        with StaticSite(site) as served, PyPISimple(f"{served.url}{index}") as client:
            assert client.get_index_page().projects == ["mamba-ssm", "causal-conv1d"]
            (package,) = client.get_project_page("causal-conv1d").packages
        assert package.filename == convolution.name
    assert "causal-conv1d" in after["index.html"].decode()
    status, printed = run()
    assert status == 0 and f"published  {convolution.name}" in printed
    assert snapshot(site) == after
    (site / "files" / convolution.name).unlink()
    status, printed = run()
    assert status == 1 and f"{convolution.name}: was published" in printed


def test_second_run_writes_nothing(run, tmp_path, anything_goes):
    run()
    site = tmp_path / "site"
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.is_file()}
    status, printed = run()
    assert status == 0 and printed.count("published ") == 2
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*") if path.is_file()} == before


def test_added_wheel_changes_no_published_file(run, wheel, tmp_path, anything_goes):
    run()
    site = tmp_path / "site"
    before = snapshot(site)
    old = json.loads(before["all/mamba-ssm/index.json"])
    status, printed = run(wheels.repack(wheel, tmp_path / "more", version="99.0").parent)
    assert status == 0 and printed.count("added ") == 1
    after = snapshot(site)
    assert {name: data for name, data in before.items() if name.startswith("files/")}.items() <= after.items()
    new = json.loads(after["all/mamba-ssm/index.json"])
    assert new["versions"] == ["99.0+cpu", *old["versions"]]
    assert [entry for entry in new["files"] if "99.0" not in entry["filename"]] == old["files"]
    assert after["cpu.other/mamba-ssm/index.html"] == before["cpu.other/mamba-ssm/index.html"]


def test_same_name_with_other_bytes_is_refused(run, wheel, tmp_path, anything_goes):
    run()
    before = snapshot(tmp_path / "site")
    other = tmp_path / "other"
    wheels.repack(wheel, other, version="99.0")
    changed = wheels.repack(wheel, other, __init__="# another build\n")
    status, printed = run(other)
    assert status == 1
    assert f"{changed.name} is published with other bytes" in printed
    assert hashlib.sha256(changed.read_bytes()).hexdigest() in printed
    assert "give the new build another version or label" in printed
    assert snapshot(tmp_path / "site") == before


@pytest.mark.parametrize(
    "what", ["damaged", "renamed", "not ours", "changed tree", "all", "files", "index.html", "yanked.txt"]
)
def test_unfit_wheel_is_refused_and_nothing_written(what, run, wheel, dist, tmp_path):
    if what == "damaged":
        bad = dist / wheel.name
        bad.write_bytes(bad.read_bytes()[:-1000])
        reason = "zip"
    elif what == "renamed":
        bad = (dist / wheel.name).rename(dist / wheel.name.replace("+cpu", "+cu130"))
        reason = "dist-info"
    elif what == "not ours":
        bad = wheels.plain(dist, "requests", "3.0")
        reason = "requests"
    elif what == "changed tree":
        bad = wheels.repack(wheel, dist, build_info={"source_dirty": True})
        reason = "commit the changes, then build"
    else:
        bad = wheels.repack(wheel, dist, label=what)
        reason = f"its label '{what}' is a file or folder of every index"
    status, printed = run()
    assert status == 1
    assert "the index was not changed:" in printed
    assert str(bad) in printed and reason in printed
    assert set(snapshot(tmp_path / "site")) <= {".lock"}


@pytest.mark.parametrize("what", ["changed", "gone", "unknown", "record"])
def test_site_changed_by_other_hands(what, run, wheel, tmp_path):
    run()
    site = tmp_path / "site"
    published = site / "files" / wheel.name
    record = site / "all" / "mamba-ssm" / "index.json"
    if what == "changed":
        published.write_bytes(wheels.repack(wheel, tmp_path / "x", __init__="# other\n").read_bytes())
        reason = "now has"
    elif what == "gone":
        published.unlink()
        reason = "is gone"
    elif what == "unknown":
        wheels.plain(site / "files", "requests", "3.0")
        reason = "requests"
    else:
        record.write_text("{")
        reason = "cannot be read"
    before = snapshot(site)
    status, printed = run(wheels.repack(wheel, tmp_path / "more", version="99.0").parent)
    assert status == 1 and reason in printed, printed
    assert snapshot(site) == before


def test_folder_that_is_no_index_is_left_alone(run, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("somebody's page")
    status, printed = run()
    assert status == 1 and "name a new or empty folder" in printed
    assert snapshot(tmp_path / "site") == {"index.html": b"somebody's page"}


def test_nothing_to_index(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no wheel" in run(tmp_path / "empty")[1]
    assert "is no folder of wheels" in run(tmp_path / "missing")[1]


def test_sdist_is_left_out_and_said(run, dist, tmp_path):
    (dist / "mamba_ssm-2.4.0.tar.gz").write_bytes(b"")
    status, printed = run()
    assert status == 0 and "left out   mamba_ssm-2.4.0.tar.gz" in printed
    assert not any("tar.gz" in name for name in snapshot(tmp_path / "site"))


def test_cut_off_anywhere_the_site_is_whole_and_the_next_run_finishes(
    run, wheel, dist, tmp_path, monkeypatch, anything_goes
):
    """Every page only ever names files that are there, with their hash, wherever the machine goes down."""
    assert run()[0] == 0
    wheels.repack(wheel, dist, version="99.0")
    site, replace, done = tmp_path / "site", make_index.os.replace, []

    def last_straw(source, target):
        if len(done) == allowed:
            raise OSError("no space left on device")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(make_index.os, "replace", last_straw)
    allowed, status = 0, 1
    while status:
        done.clear()
        # Each run starts from the site that the one before left.
        status, printed = run()
        assert status == 0 or "no space left" in printed
        files = snapshot(site)
        assert not any(name.endswith(".part") for name in files)
        for index in ("all", "cpu", "cpu.other"):
            for entry in json.loads(files[f"{index}/mamba-ssm/index.json"])["files"]:
                name = f"files/{entry['filename']}"
                assert hashlib.sha256(files[name]).hexdigest() == entry["hashes"]["sha256"]
                assert hashlib.sha256(files[f"{name}.metadata"]).hexdigest() == entry["core-metadata"]["sha256"]
        allowed = 1
    for name in ("all/mamba-ssm/index.json", "cpu/mamba-ssm/index.html", "index.html"):
        assert b"99.0" in files[name]
    page = files["cpu/mamba-ssm/index.html"]
    # The attribute's older name makes pip 23.0 and 23.1 refuse every name with an underscore.
    assert b"data-core-metadata" in page and b"data-dist-info-metadata" not in page


def test_two_runs_at_once_wait_for_each_other(run, tmp_path, monkeypatch, anything_goes):
    monkeypatch.setattr("make_index.PATIENCE", 0.2)
    (tmp_path / "site").mkdir()
    with filelock.FileLock(tmp_path / "site" / ".lock"):
        status, printed = run()
    assert status == 1 and "another run is at work" in printed
    assert run()[0] == 0


def test_everything_from_a_wheel_is_escaped(run, wheel, tmp_path, anything_goes, monkeypatch):
    evil = '"><script>alert(1)</script>&'
    bad = wheels.repack(wheel, tmp_path / "evil", build_info={**CUDA_13, "nvcc_version": f"99.{evil}"})
    monkeypatch.setattr(files_of_an_index.File, "requires_python", property(lambda file: f">=3.10{evil}"))
    monkeypatch.setattr(files_of_an_index.File, "system", property(lambda file: f"Linux{evil}"))
    assert run(bad.parent)[0] == 0
    files = snapshot(tmp_path / "site")
    for name in pages(files):
        if name.endswith(".html"):
            assert b"<script>alert" not in files[name], name
    (link,) = Links(files["cpu/mamba-ssm/index.html"].decode()).found
    assert link["data-requires-python"] == f">=3.10{evil}"
    assert "%2B" in link["href"] and "+" not in link["href"]


def test_page_for_people(run, wheel, tmp_path, anything_goes):
    """What each label needs, and lines to copy."""
    for label, platform, info in (
        ("cu130", "manylinux_2_28_x86_64", CUDA_13),
        ("cu130", "win_amd64", CUDA_13),
        ("cu129", "win_amd64", CUDA_12),
        ("cpu", "linux_x86_64", {}),
    ):
        made = wheels.repack(wheel, tmp_path / "many", label=label, platform=platform, build_info=info)
    assert run(made.parent)[0] == 0
    page = (tmp_path / "site" / "index.html").read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition("<main>")[2]))
    cu130, cu129, cpu = re.split(r" (?=cu130 Newest|cu129 Newest|cpu Newest)", text)[1:]
    assert "NVIDIA driver 580 or newer" in cu130
    assert "compute capability 7.5 (RTX 20, T4), 8.0 (A100)," in cu130 and "12.0 (RTX 50) and newer" in cu130
    assert "Linux x86-64, glibc 2.28 or newer; Windows x86-64" in cu130
    assert "pip install --index-url https://THIS-SITE/cu130/ mamba-ssm" in cu130
    assert "uv pip install --index https://THIS-SITE/cu130/ mamba-ssm" in cu130
    assert "NVIDIA driver 525 or newer" in cu129 and "7.5 (RTX 20, T4), 9.0a (H100, H200) Systems" in cu129
    assert "no GPU: CPU kernels only" in cpu and "compute capability" not in cpu.partition("Files")[0]
    assert "glibc of the building machine" in cpu
