"""The static index as pip and uv meet it: installing, pinning, damage, and a public index beside it."""

import hashlib
import re
import shutil
import subprocess
from importlib import metadata

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import make_index
import pytest
from _helpers import wheels
from _helpers.servers import StaticSite
from packaging.version import Version


@pytest.fixture(scope="module")
def site(wheel, convolution, tmp_path_factory):
    """An index of two labels and two versions, and of the convolution of one."""
    folder = tmp_path_factory.mktemp("static")
    dist = folder / "dist"
    for version in (None, "99.0"):
        for label in ("cpu", "cpu.other"):
            wheels.repack(wheel, dist, version=version, label=label)
    shutil.copy(convolution, dist)
    assert make_index.main([str(dist), str(folder / "site"), "--no-strict"]) == 0
    return folder / "site"


@pytest.fixture
def copy(site, tmp_path):
    return shutil.copytree(site, tmp_path / "site")


def exchange(path, folder):
    """Puts a whole wheel with other code in a published one's place; returns what was there."""
    good = path.read_bytes()
    shutil.copy(wheels.repack(path, folder, __init__="# not what was published\n"), path)
    return good


@pytest.mark.parametrize("client", ["pip", "uv"])
def test_newest_wheel_of_a_label_installs_and_works(site, client, programs, environment, tmp_path):
    with StaticSite(site) as served:
        status, printed = getattr(environment, client)("--index-url", f"{served.url}cpu/", "mamba-ssm")
        assert status == 0, printed
        assert "/cpu/mamba-ssm/" in served.requested
        assert "99.0" in printed and "other" not in printed
    environment.use(tmp_path)


@pytest.mark.parametrize("client", ["pip", "uv"])
def test_json_pages(site, client, programs, environment):
    """Where the server chooses by the Accept header, clients read only JSON."""
    with StaticSite(site, negotiate=True) as served:
        (site / "cpu" / "mamba-ssm" / "index.html").rename(site / "hidden")
        try:
            status, printed = getattr(environment, client)("--index-url", f"{served.url}cpu/", "mamba-ssm")
        finally:
            (site / "hidden").rename(site / "cpu" / "mamba-ssm" / "index.html")
        assert status == 0, printed
        early = any(path.endswith(".whl.metadata") for path in served.requested)
        # By this attribute since pip 23.2; an older one refuses any name with an underscore if it finds the attribute
        # that came before it, so the index does not have that.
        assert early == (client == "uv" or Version(metadata.version("pip")) >= Version("23.2")), "PEP 658 and 714"


def test_folder_without_a_server(site, environment):
    status, printed = environment.pip("--dry-run", "--index-url", (site / "cpu").as_uri(), "mamba-ssm")
    assert status == 0, printed
    assert "mamba_ssm-99.0+cpu" in printed.replace("mamba-ssm", "mamba_ssm")


def test_the_convolution_brings_the_mamba_ssm_of_its_version(site, environment, base):
    status, printed = environment.pip("--dry-run", "--index-url", (site / "cpu").as_uri(), "causal-conv1d==1.7.0")
    assert status == 0, printed
    assert f"causal-conv1d-1.7.0+mamba.{base} mamba_ssm-{base}+cpu" in printed.replace("mamba-ssm", "mamba_ssm")


def test_environment_sees_what_extras_require(environment_of, tmp_path, monkeypatch):
    """As a torch with CUDA: it requires extras of cuda-toolkit, and those NVIDIA's libraries; pip looks for all."""
    version, installed, index = "13.2.86.1", tmp_path / "installed", tmp_path / "index"
    for project, requires in {
        "torch_like": ["toolkit[runtime]==13.2.*; platform_system == 'Linux'", "missing; platform_system == 'Windows'"],
        "toolkit": ['runtime_part==13.2.86.*; extra == "runtime"', 'missing==1; extra == "other"'],
        "runtime_part": [],
    }.items():
        shutil.unpack_archive(wheels.plain(tmp_path, project, version, *requires), installed, "zip")
    made = wheels.plain(index / "block", "block", "1.0", "torch_like>=13")
    (index / "block" / "index.html").write_text(f'<!DOCTYPE html><a href="{made.name}">{made.name}</a>')
    monkeypatch.syspath_prepend(installed)
    status, printed = environment_of("torch_like").pip("--dry-run", "--index-url", index.as_uri(), "block")
    assert status == 0 and "Would install block-1.0" in printed, printed


def test_index_of_all_labels_gives_the_last_one_unless_a_version_is_named(site, programs, environment, base):
    with StaticSite(site) as served:
        words = ["--dry-run", "--index-url", f"{served.url}all/"]
        printed = environment.pip(*words, "mamba-ssm")[1]
        assert re.search(r"Would install mamba.ssm-99\.0\+cpu\.other$", printed, re.M), printed
        for wanted, given in (
            ("", "99.0+cpu.other"),
            (f"=={base}", f"{base}+cpu.other"),
            (f"=={base}+cpu", f"{base}+cpu"),
        ):
            printed = environment.uv(*words, f"mamba-ssm{wanted}")[1]
            assert f" + mamba-ssm=={given}\n" in printed, printed


@pytest.fixture
def base(wheel):
    """The version of the source tree, without a label."""
    return wheel.name.split("-")[1].split("+")[0]


@pytest.mark.parametrize("client", ["pip", "uv"])
def test_requirements_with_hashes(copy, client, programs, environment, tmp_path, base):
    """The lines that the page offers; pip and uv refuse a file with other bytes."""
    page = (copy / "cpu" / "mamba-ssm" / "index.html").read_text()
    (pin,) = re.findall(rf"<pre>(mamba-ssm=={base}\+cpu .*?)</pre>", page, re.S)
    (tmp_path / "requirements.txt").write_text(pin)
    words = ["--no-deps", "--require-hashes", "-r", tmp_path / "requirements.txt"]
    with StaticSite(copy) as served:
        words = ["--index-url", f"{served.url}cpu/", *words]
        (stored,) = (copy / "files").glob(f"mamba_ssm-{base}+cpu-*.whl")
        good = exchange(stored, tmp_path)
        status, printed = getattr(environment, client)(*words)
        assert status != 0
        assert re.search("hash mismatch|do not match the hashes", printed, re.I), printed
        stored.write_bytes(good)
        status, printed = getattr(environment, client)(*words)
        assert status == 0, printed


@pytest.mark.parametrize("client", ["pip", "uv"])
def test_damaged_file_is_refused_without_a_pin(copy, client, programs, environment):
    """pip compares the page's hash; uv, which does that only for what is pinned or locked, meets a broken archive."""
    for stored in (copy / "files").glob("mamba_ssm-*.whl"):
        data = bytearray(stored.read_bytes())
        data[len(data) // 2] ^= 1
        stored.write_bytes(data)
    with StaticSite(copy) as served:
        status, printed = getattr(environment, client)("--index-url", f"{served.url}cpu/", "mamba-ssm")
    assert status != 0
    assert {"pip": "DO NOT MATCH THE HASHES", "uv": "Failed to extract archive"}[client] in printed, printed
    assert not list(environment.folder.glob("lib/python*/site-packages/mamba_ssm*"))


@pytest.fixture
def public(tmp_path):
    """A public index that has torch, and a higher version under our name."""
    folder = tmp_path / "public"
    for project, version in (("torch", "2.9.0"), ("mamba_ssm", "1000.0")):
        page = folder / project.replace("_", "-")
        made = wheels.plain(page, project, version)
        (page / "index.html").write_text(f'<!DOCTYPE html><a href="{made.name}">{made.name}</a>')
    return folder


def test_public_index_beside_ours(site, public, environment, programs):
    """Why docs/publishing.md advises against --extra-index-url, and what is safe instead."""
    with StaticSite(site) as ours, StaticSite(public) as theirs:
        mixed = ["--dry-run", "--index-url", theirs.url, "--extra-index-url", f"{ours.url}cpu/", "mamba-ssm"]
        assert re.search(r"Would install mamba.ssm-1000\.0", environment.pip(*mixed)[1])
        safe = ["--dry-run", "--default-index", theirs.url, "--index", f"{ours.url}cpu/", "mamba-ssm"]
        assert " + mamba-ssm==99.0+cpu" in environment.uv(*safe)[1]


def test_causal_conv1d_from_two_indexes(site, environment, programs, base, tmp_path):
    """What docs/publishing.md says of them: a later one is higher. A pinned label or one index is safe."""
    theirs = tmp_path / "public" / "causal-conv1d"
    made = wheels.plain(theirs, "causal_conv1d", "1.7.1")
    (theirs / "index.html").write_text(f'<!DOCTYPE html><a href="{made.name}">{made.name}</a>')
    with StaticSite(site) as ours, StaticSite(tmp_path / "public") as public:
        words, label = ["--dry-run", "--no-deps"], f"1.7.0+mamba.{base}"
        both = [*words, "--index-url", public.url, "--extra-index-url", f"{ours.url}cpu/"]
        assert "Would install causal-conv1d-1.7.1\n" in environment.pip(*both, "causal-conv1d")[1].replace("_", "-")
        pinned = environment.pip(*both, f"causal-conv1d=={label}")[1]
        alone = environment.pip(*words, "--index-url", f"{ours.url}cpu/", "causal-conv1d")[1]
        assert all(f"Would install causal-conv1d-{label}\n" in printed.replace("_", "-") for printed in (pinned, alone))
        first = ["--default-index", public.url, "--index", f"{ours.url}cpu/", "causal-conv1d"]
        assert f" + causal-conv1d=={label}\n" in environment.uv(*words, *first)[1]


def test_uv_project_with_an_explicit_index(copy, public, programs, tmp_path, monkeypatch):
    """The lines that the page offers lock our wheel with its hash, whatever the public index has under its name."""
    monkeypatch.delenv("UV_NO_CONFIG")
    page = (copy / "cpu" / "mamba-ssm" / "index.html").read_text()
    (lines,) = re.findall(r"<pre>(\[\[tool\.uv\.index\]\].*?)</pre>", page, re.S)
    project = tmp_path / "project"
    project.mkdir()

    def uv(*words):
        done = subprocess.run([shutil.which("uv"), *words], cwd=project, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr

    with StaticSite(copy) as ours, StaticSite(public) as theirs:
        monkeypatch.setenv("UV_DEFAULT_INDEX", theirs.url)
        lines = lines.replace("&#34;", '"').replace("https://THIS-SITE/", ours.url)
        project.joinpath("pyproject.toml").write_text(
            '[project]\nname = "work"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["mamba-ssm"]\n'
            + lines
        )
        status, printed = uv("lock", "--no-progress")
        assert status == 0, printed
        locked = project.joinpath("uv.lock").read_text()
        assert 'version = "99.0+cpu"' in locked and "1000.0" not in locked
        (stored,) = (copy / "files").glob("mamba_ssm-99.0+cpu-*.whl")
        assert f"sha256:{hashlib.sha256(stored.read_bytes()).hexdigest()}" in locked
        exchange(stored, tmp_path)
        status, printed = uv("sync", "--frozen", "--no-progress")
        assert status != 0
        assert "hash mismatch" in printed.lower(), printed
    assert not list(project.glob(".venv/lib/python*/site-packages/mamba_ssm"))
