"""scripts/publish.py before anything is sent: what it refuses, and that it never tells a password."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import publish as script
import pytest
from _helpers import wheels
from _helpers.servers import HOST, PASSWORD, StaticSite, free_port
from wheel_check.source import UNCOMPARED


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr("publish.Index.holds", refuse)
    monkeypatch.setattr("publish.upload", refuse)


@pytest.mark.parametrize(
    "words",
    [
        ["--repository-url", "https://upload.pypi.org/legacy/"],
        ["--repository-url", "https://test.pypi.org/legacy/"],
        ["--repository-url", "https://PyPI.org./simple"],
        ["--repository-url", "https://pypi.python.org/pypi"],
        ["--repository", "pypi"],
        ["--repository", "testpypi"],
    ],
)
def test_public_index_is_refused(words, publish, wheel, no_network):
    status, printed = publish(wheel, *words)
    assert status == 1
    assert "is the public index, where our names are those of other projects" in printed


def test_public_index_is_refused_from_the_environment_and_pypirc(publish, wheel, no_network, monkeypatch, tmp_path):
    monkeypatch.setenv("TWINE_REPOSITORY_URL", "https://upload.pypi.org/legacy/")
    assert "is the public index" in publish(wheel)[1]
    monkeypatch.delenv("TWINE_REPOSITORY_URL")
    (tmp_path / ".pypirc").write_text(
        "[distutils]\nindex-servers = ours\n[ours]\nrepository = https://upload.pypi.org/legacy/\n"
    )
    assert "is the public index" in publish(wheel, "--repository", "ours")[1]


def test_public_index_on_request(publish, wheel, monkeypatch):
    asked = []
    monkeypatch.setattr("publish.Index.holds", lambda index, wheel: asked.append(index.url) or True)
    status, printed = publish(wheel, "--repository", "testpypi", "--allow-public-index")
    assert status == 0, printed
    assert asked == ["https://test.pypi.org/legacy"]


def test_name_of_another_host_is_no_public_index(publish, wheel, monkeypatch):
    monkeypatch.setattr("publish.Index.holds", lambda index, wheel: True)
    assert publish(wheel, "--repository-url", "https://notpypi.org/pypi.org/")[0] == 0


def test_no_index_named(publish, wheel, no_network):
    status, printed = publish(wheel)
    assert status == 1 and "no index is named: give --repository-url" in printed


def test_unknown_repository_and_url_without_a_scheme(publish, wheel, no_network):
    assert "Missing 'ours' section" in publish(wheel, "--repository", "ours")[1]
    assert "Invalid repository URL" in publish(wheel, "--repository-url", "pypi.example.com")[1]


def test_unfit_wheels_and_sdists_stop_everything_before_the_network(publish, wheel, no_network, tmp_path):
    good = wheels.repack(wheel, tmp_path, label="cpu.good")
    bad = wheels.repack(wheel, tmp_path, label="cpu.bad", __init__="import triton\n")
    dirty = wheels.repack(wheel, tmp_path, label="cpu.dirty", build_info={"source_dirty": True})
    sdist, missing = tmp_path / "mamba_ssm-2.4.0.tar.gz", tmp_path / "none.whl"
    status, printed = publish(good, bad, dirty, sdist, missing, "--repository-url", "https://pypi.example.com")
    assert status == 1
    assert f"{dirty}: " in printed and "commit the changes, then build" in printed
    assert f"{bad}: " in printed and "triton" in printed
    assert f"{sdist}: an sdist does not belong on the index" in printed
    assert f"{missing}: cannot be read: there is no such file" in printed
    assert str(good) not in printed
    assert f"note: {good.name}: {UNCOMPARED}" in printed


def test_pattern_is_expanded_where_the_shell_does_not(publish, wheel, tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr("publish.Index.holds", lambda index, wheel: held.append(wheel.path.name) or True)
    for label in ("cpu.a", "cpu.b"):
        wheels.repack(wheel, tmp_path / "dist", label=label)
    assert publish(tmp_path / "dist" / "*.whl", "--repository-url", "https://pypi.example.com")[0] == 0
    assert [name.split("-")[1].split("+")[1] for name in held] == ["cpu.a", "cpu.b"]


@pytest.mark.parametrize("where", ["command line", "index", "name", "environment", "pypirc"])
def test_password_in_the_url_is_refused_and_not_told(where, publish, wheel, no_network, monkeypatch, tmp_path):
    url = f"https://team:{PASSWORD}@pypi.example.com/"
    words = []
    if where == "command line":
        words = ["--repository-url", url]
    elif where == "index":
        words = ["--repository-url", "https://pypi.example.com/", "--index-url", url]
    elif where == "name":
        words = ["--repository", url]
    elif where == "environment":
        monkeypatch.setenv("TWINE_REPOSITORY_URL", url)
    else:
        (tmp_path / ".pypirc").write_text(f"[distutils]\nindex-servers = ours\n[ours]\nrepository = {url}\n")
        words = ["--repository", "ours"]
    status, printed = publish(wheel, *words)
    assert status == 1 and "the URL holds a user name or password" in printed


@pytest.mark.parametrize("spelt", ["https:/{}", "{}", "https://{}", "HTTPS://[::1]{}"])
def test_password_in_a_misspelt_url(spelt, publish, wheel, no_network):
    """No slash, one slash, a slash in the password: whatever a parser makes of the URL."""
    url = spelt.format(f"team:with/{PASSWORD}@pypi.example.com/")
    for option in ("--repository-url", "--index-url"):
        status, printed = publish(wheel, "--repository-url", "https://pypi.example.com/", option, url)
        assert status == 1 and "the URL holds a user name or password" in printed


@pytest.mark.parametrize("mark", "?#")
def test_query_and_fragment_are_refused_and_not_told(mark, publish, wheel, no_network, monkeypatch):
    url = f"http://pypi.example.com/{mark}token={PASSWORD}"
    for option in ("--repository-url", "--index-url"):
        status, printed = publish(wheel, "--repository-url", "https://pypi.example.com/", option, url)
        assert status == 1 and "the URL holds a query or fragment" in printed
    monkeypatch.setenv("TWINE_REPOSITORY_URL", url)
    assert "the URL holds a query or fragment" in publish(wheel)[1]


@pytest.mark.parametrize("spelt", ["http://team:{}/more@127.0.0.1:9", "team:{}#more@127.0.0.1:9", "{}://127.0.0.1:9"])
@pytest.mark.parametrize("uploading", [False, True], ids=["reading", "uploading"])
def test_proxy_that_cannot_be_parsed_is_not_shown(spelt, uploading, publish, wheel, monkeypatch):
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("HTTP_PROXY", spelt.format(PASSWORD))
    if uploading:
        monkeypatch.setattr("publish.Index.holds", lambda index, wheel: False)
    status, printed = publish(wheel, "--repository-url", "http://pypi.example.com")
    assert status == 1 and "URL: check the URL, and HTTP_PROXY and HTTPS_PROXY" in printed


def test_at_sign_in_a_path_is_no_password(publish, wheel, monkeypatch):
    """Azure's feeds are named so."""
    asked = []
    monkeypatch.setattr("publish.Index.holds", lambda index, wheel: asked.append(index.pages) or True)
    url = "https://pypi.example.com:8443/feed@Release/pypi/simple"
    assert publish(wheel, "--repository-url", "https://pypi.example.com/", "--index-url", url)[0] == 0
    assert asked == [[url]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["-u", "team", "-p", PASSWORD],
            "unknown options (see --help); user name and password come from TWINE_USERNAME",
        ),
        ([f"--password={PASSWORD}"], "unknown options (see --help)"),
        (["--password", f"--{PASSWORD}"], "unknown options (see --help)"),
        (
            [f"--repo=https://team:{PASSWORD}@pypi.example.com"],
            "unknown options (did you mean --repository? see --help)",
        ),
        ([f"--allow-public-index={PASSWORD}"], "argument --allow-public-index: takes no value"),
        ([f"--help={PASSWORD}"], "argument -h/--help: takes no value"),
        ([f"-h{PASSWORD}"], "takes no value"),
        ([PASSWORD], "a word that does not end in .whl stands where a wheel is expected"),
        ([f"https://team:{PASSWORD}@pypi.example.com"], "a URL stands where a wheel is expected"),
    ],
)
def test_word_that_is_not_understood_is_not_shown(words, reason, wheel, capsys):
    with pytest.raises(SystemExit):
        script.main([str(wheel), *words])
    printed = "".join(capsys.readouterr())
    assert reason in printed and PASSWORD not in printed


def test_malformed_pypirc_is_not_shown(publish, wheel, no_network, tmp_path):
    (tmp_path / ".pypirc").write_text(f"[distutils]\nindex-servers = ours\n[ours]\npassword {PASSWORD}\n")
    status, printed = publish(wheel, "--repository", "ours")
    assert status == 1 and "Malformed configuration" in printed


@pytest.mark.parametrize("given", [{"user": "tëam€"}, {"password": "\N{SNOWMAN}-horse"}])
def test_credentials_that_cannot_be_sent(given, publish, wheel):
    status, printed = publish(wheel, "--repository-url", "https://pypi.example.com", **given)
    assert status == 1
    assert f"the {'user name' if 'user' in given else 'password'} has a character that is not Latin-1" in printed


def test_missing_password_is_an_error_where_nobody_can_answer(publish, wheel, no_network):
    status, printed = publish(wheel, "--repository-url", "https://pypi.example.com", user=None, password=None)
    assert status == 1 and "Credential not found" in printed and "TWINE_USERNAME" in printed


def test_section_of_pypirc(publish, wheel, tmp_path):
    """URL, user and password from a file; none of them on the command line."""
    with StaticSite(tmp_path) as site:
        (tmp_path / ".pypirc").write_text(
            f"[distutils]\nindex-servers = ours\n[ours]\nrepository = {site.url}\nusername = a\npassword = {PASSWORD}\n"
        )
        status, printed = publish(wheel, "--repository", "ours", user=None, password=None)
        assert status == 1 and "status 501" in printed
        assert "/simple/mamba-ssm/" in site.requested


def test_server_that_is_not_there(publish, wheel):
    status, printed = publish(wheel, "--repository-url", f"http://{HOST}:{free_port()}/")
    assert status == 1 and "cannot be reached" in printed


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"], ids=["silent", "answers"])
def test_https_url_of_a_plain_http_server(answer, publish, wheel, monkeypatch):
    """Some wait for a line that TLS never sends: the wait is short, told, and ends with a hint."""
    monkeypatch.setattr("publish.TIME_LIMITS", (0.5, 30.0))
    monkeypatch.setattr("publish.SILENCE", 0.1)
    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=_answer_each, args=(server, answer), daemon=True).start()
        url, begin = f"https://{HOST}:{server.getsockname()[1]}/", time.monotonic()
        status, printed = publish(wheel, "--repository-url", url)
    assert status == 1 and time.monotonic() - begin < 10
    assert "cannot be reached" in printed
    assert "If this server speaks plain http, its URL begins with http://" in printed
    if not answer:
        assert f"waiting for {url}simple/ to answer ..." in printed


def _answer_each(server, answer):
    held = []
    with contextlib.suppress(OSError):  # the test closes the server
        while True:
            held.append(server.accept()[0])
            held[-1].sendall(answer)


def test_upload_that_is_never_answered(publish, wheel, tmp_path, monkeypatch):
    """Index pages are read as usual; the server takes the file and says nothing."""
    monkeypatch.setattr("publish.TIME_LIMITS", (1.0, 1.0))
    with StaticSite(tmp_path) as site:
        monkeypatch.setattr("_helpers.servers._Files.do_POST", lambda handler: time.sleep(3), raising=False)
        status, printed = publish(wheel, "--repository-url", site.url)
    assert status == 1 and f"uploading {wheel.name} to {site.url.rstrip('/')} failed" in printed
    assert "timed out" in printed and "lists nothing of this file" in printed


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("nosuch/*.whl", "there is no folder nosuch"), ("*.whl", "nothing there matches this pattern")],
)
def test_pattern_that_matches_nothing(pattern, reason, publish, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, printed = publish(pattern, "--repository-url", "https://pypi.example.com")
    assert status == 1 and f"{pattern}: cannot be read: {reason}" in printed


def test_index_without_hashes(publish, wheel, tmp_path):
    page = tmp_path / "simple" / "mamba-ssm"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')
    with StaticSite(tmp_path) as site:
        status, printed = publish(wheel, "--repository-url", site.url)
    assert status == 1 and "gives no hash of it" in printed


def test_page_that_is_no_index(publish, wheel, tmp_path):
    """No guess can be read: nothing is sent."""
    for folder in ("simple", "+simple"):
        page = tmp_path / folder / "mamba-ssm"
        page.mkdir(parents=True)
        (page / "index.json").write_text('{"message": "hello"}')
    with StaticSite(tmp_path, negotiate=True) as site:
        status, printed = publish(wheel, "--repository-url", site.url)
    assert status == 1 and "is no index page that could be read" in printed


@pytest.mark.parametrize("script", ["publish.py", "make_index.py"])
def test_without_the_extra_the_message_says_what_to_install(script, request):
    command = [sys.executable, "-S", str(request.config.rootpath / "scripts" / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    # Not of ".", which would compile, and put what it built in an installed wheel's place.
    assert done.stderr.endswith('with the file of any wheel of mamba_ssm do: pip install "WHEEL[publish]"\n')
    assert "Traceback" not in done.stderr
