"""yanked.txt of the static index (PEP 592): what pip and uv then take, and that no mistake in it goes unnoticed."""

import html
import shutil

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import make_index
import pytest
from _helpers import wheels
from _helpers.checkouts import git
from _helpers.servers import StaticSite
from packaging.version import Version
from pypi_simple import ACCEPT_HTML_ONLY, ACCEPT_JSON_ONLY, PyPISimple
from wheel_build import convolution
from wheel_check import Verdict
from wheel_check.wheel import read_wheel

PROJECT = "causal-conv1d"
REASON = 'Wrong "dx" for width < 4 & seq_idx: take 1.6.1'


@pytest.fixture
def versions(checkout, tmp_path):
    """{version: name of its wheel}, and the wheels in the folder dist: 1.6.1 and a later one."""
    dist, file = tmp_path / "dist", checkout / "causal-conv1d" / "src" / "causal_conv1d" / "__init__.py"
    dist.mkdir()
    text, found = file.read_text(), {}
    (line,) = (line for line in text.splitlines() if line.startswith("__version__ = "))
    for version in ("1.6.1", "1.7"):
        file.write_text(text.replace(line, f'__version__ = "{version}"'))
        git(checkout, "commit", "--quiet", "--all", "--allow-empty", f"--message={version}")
        found[version] = convolution.build(checkout, dist, None).name
    return found


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site"


@pytest.fixture
def run(tmp_path, site, capsys):
    """run() -> (exit status, everything printed)."""

    def call():
        capsys.readouterr()
        status = make_index.main([str(tmp_path / "dist"), str(site)])
        return status, "".join(capsys.readouterr())

    return call


@pytest.fixture
def yank(versions, site, run):
    """yank(text) -> (exit status, everything printed): of a run with this yanked.txt. The first run was without."""
    assert run()[0] == 0

    def call(text):
        (site / "yanked.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
        return run()

    return call


def snapshot(site):
    return {path.relative_to(site): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def packages(site, accept, index="all"):
    with StaticSite(site, negotiate=True) as served, PyPISimple(f"{served.url}{index}", accept=accept) as client:
        return {package.filename: package for package in client.get_project_page(PROJECT).packages}


@pytest.mark.parametrize("client", ["pip", "uv"])
@pytest.mark.parametrize("form", ["html", "json"])
def test_yanked_version_is_taken_only_if_it_is_pinned(form, client, yank, versions, site, environment, programs):
    with StaticSite(site, negotiate=form == "json") as served:
        command = getattr(environment, client)
        words = ["--dry-run", "--no-deps", "--index-url", f"{served.url}all/"]
        words += ["--refresh"] if client == "uv" else []  # which keeps pages for ten minutes
        assert chosen(*command(*words, PROJECT)) == "1.7"
        status, printed = yank(f"{versions['1.7']}  {REASON}\n")
        assert status == 0 and f"yanked     {versions['1.7']}: {REASON}" in printed, printed
        assert chosen(*command(*words, PROJECT)) == "1.6.1"
        assert chosen(*command(*words, f"{PROJECT}>=1.6")) == "1.6.1"
        full = versions["1.7"].split("-")[1]
        status, printed = command(*words, f"{PROJECT}=={full}")
        assert chosen(status, printed) == "1.7"
        assert REASON in printed, "the user is told why"
        # Without the label it is a pin for pip; uv wants the whole version of what is yanked.
        status, printed = command(*words, f"{PROJECT}==1.7")
        if client == "pip":
            assert chosen(status, printed) == "1.7"
        else:
            assert status != 0 and "was yanked" in printed
        assert yank("")[0] == 0
        assert chosen(*command(*words, PROJECT)) == "1.7"


def chosen(status, printed):
    """The version, without its label, that pip or uv would install."""
    assert status == 0, printed
    (line,) = (line for line in printed.splitlines() if line.startswith((" + ", "Would install causal")))
    return line.split("+mamba")[0].replace("==", "-").rpartition("-")[2]


def test_reason_in_html_and_json(yank, versions, site):
    yank(f"{versions['1.7']}  {REASON}\n")
    for accept in (ACCEPT_HTML_ONLY, ACCEPT_JSON_ONLY):
        found = packages(site, accept)
        assert (found[versions["1.7"]].is_yanked, found[versions["1.7"]].yanked_reason) == (True, REASON)
        assert not found[versions["1.6.1"]].is_yanked
    assert html.escape(REASON, quote=False) in (site / "index.html").read_text().replace("&#34;", '"')


def test_next_runs_keep_it(yank, versions, site, run, checkout, tmp_path):
    text = f"# of a person\n{versions['1.7']}  {REASON}\n"
    yank(text)
    before = snapshot(site)
    status, printed = run()
    assert status == 0 and f"yanked     {versions['1.7']}: {REASON}" in printed
    assert snapshot(site) == before
    shutil.rmtree(tmp_path / "dist")
    (tmp_path / "dist").mkdir()
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=more")
    source = checkout / "causal-conv1d" / "src" / "causal_conv1d" / "__init__.py"
    source.write_text(source.read_text().replace('"1.7"', '"1.8"'))
    git(checkout, "commit", "--quiet", "--all", "--message=1.8")
    added = convolution.build(checkout, tmp_path / "dist", None).name
    assert run()[0] == 0
    found = packages(site, ACCEPT_JSON_ONLY)
    assert {name: package.is_yanked for name, package in found.items()} == {
        versions["1.6.1"]: False,
        versions["1.7"]: True,
        added: False,
    }
    assert (site / "yanked.txt").read_text() == text


def test_without_its_line_a_wheel_is_offered_again(yank, versions, site):
    before = snapshot(site)
    yank(f"{versions['1.7']}  {REASON}\n{versions['1.6.1']}  Too old\n")
    status, printed = yank(f"{versions['1.6.1']}  Too old\n")
    assert status == 0 and f"unyanked   {versions['1.7']}: it is offered again" in printed
    yank(before[(site / "yanked.txt").relative_to(site)])
    assert snapshot(site) == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{old}x  Wrong results\n", "line 1: '{old}x' is no wheel of this index (did you mean {old}?)"),
        ("\nmamba-ssm==2.4.0  Wrong results\n", "line 2: 'mamba-ssm==2.4.0' is no wheel of this index"),
        ("{old}\n", "line 1: {old} has no reason: write behind the name what is wrong"),
        ("{old}  One\n{old}  Two\n", "line 2: {old} is there twice: keep one line"),
        ("{old}  A\x1b[31mlarm\n", "holds a character that cannot be shown"),
        (b"\xff\xfe", "is no UTF-8 text"),
    ],
)
def test_wrong_line_changes_nothing(text, reason, yank, versions, site):
    before = snapshot(site)
    names = {"old": versions["1.6.1"]}
    text = text if isinstance(text, bytes) else text.format(**names)
    status, printed = yank(text)
    assert status == 1 and "the index was not changed" in printed and reason.format(**names) in printed, printed
    (site / "yanked.txt").write_bytes(before[(site / "yanked.txt").relative_to(site)])
    assert snapshot(site) == before


def test_all_wrong_lines_are_told_at_once(yank, versions):
    status, printed = yank("a.whl  one\nb.whl  two\n")
    assert status == 1 and "line 1: 'a.whl'" in printed and "line 2: 'b.whl'" in printed


def test_lost_file_does_not_offer_again_what_was_yanked(yank, versions, site, run):
    yank(f"{versions['1.7']}  {REASON}\n")
    (site / "yanked.txt").unlink()
    before = snapshot(site)
    status, printed = run()
    assert status == 1
    assert f"yanked.txt is gone, and the pages say that these wheels are yanked: {versions['1.7']}. Restore" in printed
    assert snapshot(site) == before
    assert yank("")[0] == 0
    assert not packages(site, ACCEPT_JSON_ONLY)[versions["1.7"]].is_yanked


def test_file_of_windows_notepad(yank, versions, site):
    assert yank(b"\xef\xbb\xbf" + f"{versions['1.7']}\t{REASON}\r\n\r\n  # more\r\n".encode())[0] == 0
    assert packages(site, ACCEPT_JSON_ONLY)[versions["1.7"]].yanked_reason == REASON


def test_new_site_explains_the_file(yank, site):
    text = (site / "yanked.txt").read_text()
    assert all(line.startswith("#") for line in text.splitlines()) and "PEP 592" in text


def test_pages_advise_what_is_not_yanked(wheel, tmp_path, site, run, monkeypatch):
    monkeypatch.setattr("wheel_gate.verify_to_publish", lambda path, **_: Verdict([], [], read_wheel(path)))
    for version in (None, "99.0"):
        made = wheels.repack(wheel, tmp_path / "dist", version=version, label="cpu")
    older = str(Version(wheel.name.split("-")[1]))
    assert run()[0] == 0
    (site / "yanked.txt").write_text(f"{made.name}  Wrong\n")
    assert run()[0] == 0
    page, everything = (site / name for name in ("cpu/mamba-ssm/index.html", "all/mamba-ssm/index.html"))
    assert f"<dd>{older}</dd>" in page.read_text() and f"mamba-ssm=={older} \\" in page.read_text()
    assert "mamba-ssm==99.0" not in page.read_text() + everything.read_text()
    assert f"mamba-ssm=={older}" in (site / "index.html").read_text()
    (site / "yanked.txt").write_text(f"{made.name}  Wrong\n{wheel.name}  Wrong too\n")
    assert run()[0] == 0
    assert "99.0+cpu (yanked: see below)" in page.read_text() and "Every file is yanked." in page.read_text()
