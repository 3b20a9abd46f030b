"""MAMBA_RELEASE: what it asks of the machine, what it changes; the wheel's last steps; the bill of materials."""

import json
import os
import re
import shutil
import stat
import subprocess
import zipfile

import pytest
from wheel_build import build_info, cmake, facts, finish, sbom, version
from wheel_build.config import read_config
from wheel_build.plan import make_plan, more_requirements

ZIG = facts.Tool("/venv/ziglang/zig", "0.16.0")
AUDITWHEEL = facts.Tool("/venv/auditwheel/__init__.py", "6.8.2")
RELEASE = {"MAMBA_RELEASE": "1"}
INFO = {
    "cuda": True,
    "nvcc_version": "13.0.88",
    "host_compiler": "GNU 12.2.0",
    "linker": "zig 0.16.0",
    "libraries": {
        "libmamba_cuda.so": {"size": 4, "sha256": "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"}
    },
    "source_commit": "0" * 40,
    "source_dirty": False,
}


def plan_of(environ, machine):
    return make_plan(read_config(environ), machine, "2.4.0")


def codes(plan):
    return [(finding.code, finding.severity) for finding in plan.findings]


def test_release_is_linked_for_an_older_glibc_and_says_so(machine):
    plan = plan_of(RELEASE, machine(zig=ZIG, auditwheel=AUDITWHEEL))
    assert plan.findings == ()
    assert plan.wheel == "mamba_ssm-2.4.0+cu130-py3-none-manylinux_2_28_x86_64.whl"
    assert plan.tag == ("py3", "none", "manylinux_2_28_x86_64")
    assert {"-DMAMBA_GLIBC=2.28", "-DMAMBA_ZIG=/venv/ziglang/zig"} <= set(cmake.arguments(plan, {}))
    assert "glibc 2.28 and newer" in plan.as_text()


def test_without_the_switch_nothing_of_it_is_asked_for(machine):
    plan = plan_of({}, machine())
    assert plan.findings == ()
    assert plan.glibc == ""
    assert "-DMAMBA_GLIBC=" in cmake.arguments(plan, {})


@pytest.mark.parametrize(
    ("environ", "changes", "expected"),
    [
        ({}, {"zig": None}, [("ziglang-missing", "fatal")]),
        ({}, {"auditwheel": None}, [("auditwheel-missing", "fatal")]),
        ({"DEBUG": "1"}, {}, [("release-debug", "fatal")]),
        ({}, {"platform": "win32", "zig": None}, [("switch-without-effect", "note")]),
    ],
)
def test_findings(machine, environ, changes, expected):
    plan = plan_of({**RELEASE, **environ}, machine(**{"zig": ZIG, "auditwheel": AUDITWHEEL, **changes}))
    assert codes(plan) == expected
    if changes.get("platform") == "win32":
        assert plan.wheel.endswith("-win_amd64.whl")
        assert plan.glibc == ""


def test_release_has_its_own_build_folder_wherever_zig_is(machine, tmp_path):
    usual = cmake.build_folder(tmp_path, plan_of({}, machine()), {})
    release = [
        cmake.build_folder(tmp_path, plan_of(RELEASE, machine(zig=facts.Tool(path), auditwheel=AUDITWHEEL)), {})
        for path in ("/tmp/isolated-1/zig", "/tmp/isolated-2/zig")
    ]
    assert release[0] == release[1] != usual


def test_tools_are_required_of_a_release_only(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    assert more_requirements(RELEASE) == ["ziglang", "auditwheel"]
    assert more_requirements({}) == []
    monkeypatch.setattr("sys.platform", "win32")
    assert more_requirements(RELEASE) == []


# ---- the last steps --------------------------------------------------------------------------------------------------


def archive(path, mode, moment):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in ("mamba_ssm/__init__.py", "mamba_ssm/lib/libmamba_cpu.so"):
            entry = zipfile.ZipInfo(name, moment)
            entry.external_attr, entry.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, name * 100)
    return path


def test_settled_archives_are_the_same_bytes(tmp_path):
    """Of another umask, of Windows (which has no modes), at another time."""
    one = archive(tmp_path / "1.whl", stat.S_IFREG | 0o600, (2026, 1, 2, 3, 4, 6))
    two = archive(tmp_path / "2.whl", 0o666, (1990, 1, 1, 0, 0, 0))
    for wheel in (one, two):
        finish.settle(wheel, 1700000000)
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as wheel:
        assert wheel.testzip() is None
        assert {entry.external_attr >> 16 for entry in wheel.infolist()} == {stat.S_IFREG | 0o644}
        assert {entry.date_time for entry in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}
    assert sorted(os.listdir(tmp_path)) == ["1.whl", "2.whl"]


def test_time_before_zip_archives_is_their_earliest(tmp_path):
    wheel = archive(tmp_path / "1.whl", 0o644, (2026, 1, 2, 3, 4, 6))
    finish.settle(wheel, 0)
    assert zipfile.ZipFile(wheel).infolist()[0].date_time == (1980, 1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("words", "fit"),
    [
        ('x.whl is consistent\nwith the following platform tag: "manylinux_2_17_x86_64".', True),
        ('x.whl is consistent with the following platform\ntag: "manylinux_2_28_x86_64".', True),
        ('x.whl is consistent with the following platform tag: "manylinux_2_34_x86_64".', False),
        ('x.whl is consistent with the following platform tag: "linux_x86_64".', False),
        ("No module named auditwheel", False),
    ],
)
def test_auditwheel_has_the_last_word(monkeypatch, tmp_path, words, fit):
    done = subprocess.CompletedProcess([], 0, stdout=words)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    if fit:
        finish.check_release(tmp_path / "x.whl", "2.28")
    else:
        with pytest.raises(finish.ReleaseError, match=r"not find x\.whl fit for glibc 2\.28") as caught:
            finish.check_release(tmp_path / "x.whl", "2.28")
        assert words in str(caught.value)


# ---- bill of materials -----------------------------------------------------------------------------------------------


def test_sbom_tells_what_is_inside():
    document = json.loads(sbom.text(INFO, "2.4.0+cu130"))
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/mamba-ssm@2.4.0%2Bcu130"
    parts = {part["name"]: part for part in document["components"]}
    assert set(parts) == {"mamba_ssm/lib/libmamba_cuda.so", "cudart_static"}
    assert parts["cudart_static"]["version"] == "13.0"
    tools = [(tool["name"], tool["version"]) for tool in document["metadata"]["tools"]["components"]]
    assert tools == [("GNU", "12.2.0"), ("nvcc", "13.0.88"), ("zig", "0.16.0")]
    assert sbom.text(INFO, "2.4.0+cu130") == sbom.text(dict(INFO), "2.4.0+cu130")


def test_sbom_of_a_windows_build_for_cpu_names_its_static_runtime():
    info = {**INFO, "cuda": False, "nvcc_version": None, "host_compiler": "MSVC 19.44.35211.0", "linker": None}
    info["libraries"] = {}
    document = json.loads(sbom.text(info, "2.4.0+cpu"))
    assert [part["name"] for part in document["components"]] == ["libcmt"]


def test_sbom_of_a_cross_built_wheel_names_what_mingw_links_in():
    cross = {"mamba_cpu": "GNU 12.2.0", "mingw_w64": "10.0"}
    document = json.loads(sbom.text({**INFO, "linker": None, "libraries": {}, "cross_built": cross}, "2.4.0+cu130"))
    parts = {part["name"]: part["version"] for part in document["components"]}
    assert parts == {"cudart_static": "13.0", "libstdc++": "12.2.0", "winpthreads": "10.0"}


# ---- where the time comes from ---------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_git_answers_in_a_checkout_of_another_user(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own, for its tests of this
    if subprocess.run([*git, "log"], capture_output=True).returncode == 0:
        pytest.skip("this git does not ask whose a checkout is")
    commit, seconds, changed = facts.git_state(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert seconds > 1700000000
    assert not changed


def test_source_of_an_sdist_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "git_state", lambda root: ("a" * 40, 1700000000, True))
    line = build_info.source_line(tmp_path)
    monkeypatch.setattr(facts, "git_state", lambda root: ("", 0, False))
    assert build_info.source_of(tmp_path) == build_info.Source()
    (tmp_path / build_info.SOURCE_FILE).write_text(line)
    assert build_info.source_of(tmp_path) == build_info.Source("a" * 40, 1700000000, True)
    (tmp_path / build_info.SOURCE_FILE).write_text(build_info.source_line(tmp_path / "without"))
    assert build_info.source_of(tmp_path) == build_info.Source()


def test_tag_of_a_release():
    assert version.wheel_tag("linux", "x86_64", release=True)[2] == "manylinux_2_28_x86_64"
    assert version.wheel_tag("win32", "AMD64", release=True)[2] == "win_amd64"
