"""The bytes that were verified are the ones that are published, whoever exchanges the file meanwhile."""

import hashlib
import json
import os
import shutil
import stat
import zipfile
from pathlib import Path

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
import wheel_check.source
from _helpers import wheels
from _helpers.servers import Uploads
from wheel_build import convolution

CODE = "causal_conv1d/__init__.py"


def changed(wheel, folder, code=b"import os\n", seconds=None):
    """The wheel with another file in it and an honest RECORD, as somebody makes it who wants it installed."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
        dates = {entry.date_time for entry in archive.infolist()}
    contents[CODE] += code
    folder.mkdir(exist_ok=True)
    made = wheels.write(folder / wheel.name, contents)
    assert len(dates) == 1 and made.read_bytes() != wheel.read_bytes()
    return made


@pytest.fixture
def evil(committed, tmp_path):
    return changed(committed, tmp_path / "evil")


def overwrite(wheel, evil):
    wheel.write_bytes(evil.read_bytes())


def rename(wheel, evil):
    shutil.copy(evil, wheel.with_name("other"))
    os.replace(wheel.with_name("other"), wheel)


def link_the_file(wheel, evil):
    wheel.unlink()
    wheel.symlink_to(evil)


def link_the_folder(wheel, evil):
    wheel.parent.rename(wheel.parent.with_name("moved"))
    wheel.parent.symlink_to(evil.parent)


EXCHANGES = pytest.mark.parametrize("exchange", [overwrite, rename, link_the_file, link_the_folder])


@EXCHANGES
def test_file_replaced_before_the_upload(exchange, gate, committed, evil):
    """As soon as the server is asked for the first time it exchanges the file that it is about to be sent."""
    good = committed.read_bytes()
    status, printed, received = gate.upload(committed, first=lambda: exchange(committed, evil))
    assert committed.read_bytes() == evil.read_bytes() != good
    assert status == 0, printed
    assert received == {committed.name: good}


def test_what_is_sent_lies_where_nobody_else_can_exchange_it(publish, committed, monkeypatch):
    seen = []

    def take(_settings, paths):
        (path,) = map(Path, paths)
        seen.append((stat.S_IMODE(path.parent.stat().st_mode), os.listdir(path.parent), path.read_bytes(), path))

    monkeypatch.setattr("publish.upload", take)
    monkeypatch.setattr("publish.Index.holds", lambda index, wheel: bool(seen))
    assert publish(committed, "--repository-url", "https://pypi.example.com", strict=True)[0] == 0
    ((mode, names, data, path),) = seen
    assert (mode, names, data) == (0o700, [committed.name], committed.read_bytes())
    assert not path.parent.exists()


def test_index_that_lists_other_bytes_than_it_was_sent(gate, committed):
    status, printed, _ = gate.upload(committed, stored=lambda data: data + b"more")
    assert status == 1
    assert "right after this file was sent" in printed and "find out who" in printed


def test_two_files_of_one_name(committed, checkout, publish, tmp_path):
    """Of one commit, so that only the archive differs."""
    other = convolution.build(checkout, tmp_path, 1_700_000_000)
    with Uploads() as server:
        status, printed = publish(committed, other, "--repository-url", server.url)
    assert status == 1 and server.received == {}
    assert f"{other}: {committed} has this name too, and other bytes" in printed


def after_verification(monkeypatch, act):
    check = wheel_check.source.check_source

    def then(wheel):
        found = check(wheel)
        act()
        return found

    monkeypatch.setattr("wheel_check.source.check_source", then)


@EXCHANGES
def test_file_replaced_before_the_index_is_written(exchange, gate, committed, evil, monkeypatch, tmp_path):
    good = committed.read_bytes()
    after_verification(monkeypatch, lambda: exchange(committed, evil))
    status, printed = gate.index(committed.parent)
    assert status == 0, printed
    assert_published(tmp_path / "site", committed.name, good)


def test_file_replaced_in_the_site_before_the_pages_are_written(gate, committed, evil, monkeypatch, tmp_path):
    """The pages tell the hash that was verified, so pip refuses the file, and the next run tells of it."""
    good, replace = committed.read_bytes(), os.replace

    def then(source, target):
        replace(source, target)
        if str(target).endswith(".whl"):
            Path(target).write_bytes(evil.read_bytes())

    monkeypatch.setattr("make_index.os.replace", then)
    assert gate.index(committed.parent)[0] == 0
    stored = tmp_path / "site" / "files" / committed.name
    assert stored.read_bytes() == evil.read_bytes()
    stored.write_bytes(good)
    assert_published(tmp_path / "site", committed.name, good)
    stored.write_bytes(evil.read_bytes())
    status, printed = gate.index(committed.parent)
    assert status == 1 and "now has sha256" in printed


def assert_published(site, name, data):
    assert (site / "files" / name).read_bytes() == data
    (entry,) = json.loads((site / "all" / "causal-conv1d" / "index.json").read_bytes())["files"]
    assert entry["hashes"]["sha256"] == hashlib.sha256(data).hexdigest()
    metadata = (site / "files" / f"{name}.metadata").read_bytes()
    with zipfile.ZipFile(site / "files" / name) as archive:
        assert metadata == archive.read(f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA")
    assert entry["core-metadata"]["sha256"] == hashlib.sha256(metadata).hexdigest()


def test_leftover_of_a_run_is_verified_and_written_as_it_was_verified(gate, committed, evil, monkeypatch, tmp_path):
    """A wheel in site/files that no page names: a run was cut off, or somebody put it there."""
    (tmp_path / "site" / "files").mkdir(parents=True)
    stored = tmp_path / "site" / "files" / committed.name
    shutil.copy(evil, stored)
    status, printed = gate.index(tmp_path / "site" / "files")
    assert status == 1 and f"{CODE}: not as in commit" in printed
    good = committed.read_bytes()
    stored.write_bytes(good)
    after_verification(monkeypatch, lambda: overwrite(stored, evil))
    assert gate.index(tmp_path / "site" / "files")[0] == 0
    assert_published(tmp_path / "site", committed.name, good)


def test_page_is_not_written_through_a_link(gate, committed, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("somebody's file")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / ".index.html.part").symlink_to(victim)
    assert gate.index(committed.parent)[0] == 0
    assert victim.read_text() == "somebody's file"
    assert (tmp_path / "site" / "index.html").is_file()


def test_record_that_names_a_file_elsewhere(gate, committed, tmp_path):
    assert gate.index(committed.parent)[0] == 0
    record = tmp_path / "site" / "all" / "causal-conv1d" / "index.json"
    record.write_text(record.read_text().replace(committed.name, f"../../{committed.name}"))
    status, printed = gate.index(committed.parent)
    assert status == 1 and "a file name of it has a folder" in printed
