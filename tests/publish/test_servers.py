"""Uploads to pypiserver and devpi, what they refuse, and installing from them with pip and uv."""

import shutil
import threading
from pathlib import Path

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
import requests
from _helpers import wheels
from _helpers.servers import CutWire, PyPIServer, StaticSite


@pytest.mark.parametrize("client", ["pip", "uv"])
@pytest.mark.parametrize("server", ["pypiserver", "devpi"])
def test_published_wheels_install_and_work(server, client, request, publish, wheel, convolution, environment, tmp_path):
    index = request.getfixturevalue(server)
    status, printed = publish(wheel, convolution, "--repository-url", index.upload_url)
    assert status == 0, printed
    # The second of the two clients finds them there.
    for name in (wheel.name, convolution.name):
        assert f"published: {name}" in printed or f"already there: {name}" in printed
    status, printed = getattr(environment, client)("--index-url", index.index_url, "causal-conv1d>=1.4")
    assert status == 0, printed
    environment.use(tmp_path)  # mamba_ssm, which the other requires


@pytest.mark.parametrize("server", ["pypiserver", "devpi"])
def test_second_run_skips_and_other_bytes_are_refused(server, request, publish, wheel, tmp_path):
    index = request.getfixturevalue(server)
    first = wheels.repack(wheel, tmp_path / "first", label=f"cpu.again.{server}")
    second = wheels.repack(wheel, tmp_path / "second", label=f"cpu.again.{server}", version="99.0")
    status, printed = publish(first, "--repository-url", index.upload_url)
    assert (status, "Uploading" in printed) == (0, True), printed
    status, printed = publish(first, second, "--repository-url", index.upload_url)
    assert status == 0, printed
    assert f"already there: {first.name}" in printed and f"published: {second.name}" in printed

    other = wheels.repack(wheel, tmp_path / "other", label=f"cpu.again.{server}", __init__="# another build\n")
    new = wheels.repack(wheel, tmp_path / "new", label=f"cpu.new.{server}")
    status, printed = publish(new, other, "--repository-url", index.upload_url)
    assert status == 1
    assert f"{other.name} is on the index with other bytes" in printed
    assert "give the new build another version or label" in printed
    page = requests.get(f"{index.index_url}mamba-ssm/", timeout=60).text
    assert "cpu.again" in page and "cpu.new" not in page, "nothing is sent when one file is refused"


@pytest.mark.parametrize("server", ["pypiserver", "devpi"])
def test_wrong_password(server, request, publish, wheel, tmp_path):
    index = request.getfixturevalue(server)
    mine = wheels.repack(wheel, tmp_path, label=f"cpu.wrong.{server}")
    status, printed = publish(mine, "--repository-url", index.upload_url, password="battery-staple")
    assert status == 1
    assert "failed: status 40" in printed and "password" in printed
    assert "lists nothing of this file" in printed
    assert "cpu.wrong" not in requests.get(f"{index.index_url}mamba-ssm/", timeout=60).text


def test_read_only_index(devpi, publish, wheel):
    status, printed = publish(wheel, "--repository-url", devpi.read_only_url)
    assert status == 1
    assert "status 403" in printed and "this user may not do that here" in printed


def test_static_site_takes_no_uploads(publish, wheel, tmp_path):
    with StaticSite(tmp_path) as site:
        status, printed = publish(wheel, "--repository-url", site.url)
    assert status == 1
    assert "status 501" in printed and "a static site cannot" in printed


def test_server_that_accepts_and_does_not_list(publish, wheel, pypiserver, devpi, monkeypatch):
    """Said to be read elsewhere than where it is written to: no success without the file on the index."""
    monkeypatch.setattr("publish.PATIENCE", 2.0)
    status, printed = publish(
        wheels.repack(wheel, Path(pypiserver.packages).parent / "made", label="cpu.elsewhere"),
        *("--repository-url", pypiserver.upload_url, "--index-url", devpi.index_url),
    )
    assert status == 1
    assert f"{devpi.index_url.rstrip('/')} did not list it" in printed and "--index-url" in printed


def test_server_that_dies_in_the_middle_of_an_upload(programs, publish, wheel, tmp_path):
    server = PyPIServer(tmp_path / "server")
    second = wheels.repack(wheel, tmp_path, label="cpu.second")
    with server.running() as process, CutWire(server.port, 150_000, process.kill) as wire:
        status, printed = publish(wheel, second, "--repository-url", wire.url)
        process.wait(30)
    assert status == 1
    assert f"uploading {wheel.name} to {wire.url.rstrip('/')} failed" in printed
    assert "cannot be reached" in printed and "run the same command again" in printed
    assert list(server.packages.iterdir()) == []
    with server.running():
        status, printed = publish(wheel, second, "--repository-url", server.upload_url)
        assert status == 0, printed
    assert (server.packages / wheel.name).read_bytes() == wheel.read_bytes()
    assert (server.packages / second.name).read_bytes() == second.read_bytes()


def test_half_a_file_on_the_index_is_found_out(pypiserver, publish, wheel, tmp_path, environment):
    """As a server leaves it that writes while it receives."""
    whole = wheels.repack(wheel, tmp_path, label="cpu.half")
    half = pypiserver.packages / whole.name
    half.write_bytes(whole.read_bytes()[:100_000])
    status, printed = publish(whole, "--repository-url", pypiserver.upload_url)
    half.unlink()
    assert status == 1
    assert "with other bytes" in printed and "delete it there first" in printed


def test_answer_that_is_lost_after_the_upload(programs, publish, wheel, tmp_path):
    """The connection breaks when all has been stored: the index lists the file, so it is published."""
    server = PyPIServer(tmp_path / "server")
    with server.running() as process:
        stored = threading.Event()

        def store_and_cut():
            shutil.copy(wheel, server.packages / "arriving")
            (server.packages / "arriving").rename(server.packages / wheel.name)
            stored.set()

        with CutWire(server.port, 150_000, store_and_cut) as wire:
            status, printed = publish(wheel, "--repository-url", wire.url)
        assert stored.is_set() and process.poll() is None
    assert (status, f"published: {wheel.name}" in printed) == (0, True), printed
