"""What publish.py and make_index.py let through: the bytes that were verified, of a known commit, signed, rebuilt."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import time
import zipfile
from pathlib import Path

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import make_index
import pytest
import rebuild_check
import sign_wheels
import wheel_check.source
from _helpers import wheels
from _helpers.commits import git
from _helpers.servers import Uploads
from wheel_build import convolution

CODE = "causal_conv1d/__init__.py"


@pytest.fixture
def index(tmp_path, capsys):
    """index(folder, *options) -> (exit status, everything printed); adds its wheels to the folder site, strictly."""

    def call(folder, *options):
        capsys.readouterr()
        status = make_index.main([str(folder), str(tmp_path / "site"), *map(str, options)])
        return status, "".join(capsys.readouterr())

    return call


@pytest.fixture
def upload(publish, capsys):
    """upload(wheel, *options) -> (exit status, everything printed, what the index received), strictly."""

    def call(wheel, *options, **hooks):
        with Uploads(**hooks) as server:
            status, printed = publish(wheel, "--repository-url", server.url, *options, strict=True)
        return status, printed, server.received

    return call


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
def test_file_replaced_before_the_upload(exchange, upload, committed, evil):
    """As soon as the server is asked for the first time it exchanges the file that it is about to be sent."""
    good = committed.read_bytes()
    status, printed, received = upload(committed, first=lambda: exchange(committed, evil))
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


def test_index_that_lists_other_bytes_than_it_was_sent(upload, committed):
    status, printed, _ = upload(committed, stored=lambda data: data + b"more")
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
def test_file_replaced_before_the_index_is_written(exchange, index, committed, evil, monkeypatch, tmp_path):
    good = committed.read_bytes()
    after_verification(monkeypatch, lambda: exchange(committed, evil))
    status, printed = index(committed.parent)
    assert status == 0, printed
    assert_published(tmp_path / "site", committed.name, good)


def test_file_replaced_in_the_site_before_the_pages_are_written(index, committed, evil, monkeypatch, tmp_path):
    """The pages tell the hash that was verified, so pip refuses the file, and the next run tells of it."""
    good, replace = committed.read_bytes(), os.replace

    def then(source, target):
        replace(source, target)
        if str(target).endswith(".whl"):
            Path(target).write_bytes(evil.read_bytes())

    monkeypatch.setattr("make_index.os.replace", then)
    assert index(committed.parent)[0] == 0
    stored = tmp_path / "site" / "files" / committed.name
    assert stored.read_bytes() == evil.read_bytes()
    stored.write_bytes(good)
    assert_published(tmp_path / "site", committed.name, good)
    stored.write_bytes(evil.read_bytes())
    status, printed = index(committed.parent)
    assert status == 1 and "now has sha256" in printed


def assert_published(site, name, data):
    assert (site / "files" / name).read_bytes() == data
    (entry,) = json.loads((site / "all" / "causal-conv1d" / "index.json").read_bytes())["files"]
    assert entry["hashes"]["sha256"] == hashlib.sha256(data).hexdigest()
    metadata = (site / "files" / f"{name}.metadata").read_bytes()
    with zipfile.ZipFile(site / "files" / name) as archive:
        assert metadata == archive.read(f"{'-'.join(name.split('-')[:2])}.dist-info/METADATA")
    assert entry["core-metadata"]["sha256"] == hashlib.sha256(metadata).hexdigest()


def test_leftover_of_a_run_is_verified_and_written_as_it_was_verified(index, committed, evil, monkeypatch, tmp_path):
    """A wheel in site/files that no page names: a run was cut off, or somebody put it there."""
    (tmp_path / "site" / "files").mkdir(parents=True)
    stored = tmp_path / "site" / "files" / committed.name
    shutil.copy(evil, stored)
    status, printed = index(tmp_path / "site" / "files")
    assert status == 1 and f"{CODE}: not as in commit" in printed
    good = committed.read_bytes()
    stored.write_bytes(good)
    after_verification(monkeypatch, lambda: overwrite(stored, evil))
    assert index(tmp_path / "site" / "files")[0] == 0
    assert_published(tmp_path / "site", committed.name, good)


def test_page_is_not_written_through_a_link(index, committed, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("somebody's file")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / ".index.html.part").symlink_to(victim)
    assert index(committed.parent)[0] == 0
    assert victim.read_text() == "somebody's file"
    assert (tmp_path / "site" / "index.html").is_file()


def test_record_that_names_a_file_elsewhere(index, committed, tmp_path):
    assert index(committed.parent)[0] == 0
    record = tmp_path / "site" / "all" / "causal-conv1d" / "index.json"
    record.write_text(record.read_text().replace(committed.name, f"../../{committed.name}"))
    status, printed = index(committed.parent)
    assert status == 1 and "a file name of it has a folder" in printed


def refused(committed, upload, index, tmp_path, *options):
    """What both programs say; neither sends nor writes anything."""
    status, sent, received = upload(committed, *options)
    assert (status, received) == (1, {}), sent
    status, written = index(committed.parent, *options)
    assert status == 1 and {path.name for path in (tmp_path / "site").rglob("*")} <= {".lock"}, written
    assert str(committed) in sent and str(committed) in written
    return sent, written


def accepted(committed, upload, index, *options):
    status, printed, received = upload(committed, *options)
    assert status == 0 and received == {committed.name: committed.read_bytes()}, printed
    status, written = index(committed.parent, *options)
    assert status == 0 and f"added      {committed.name}" in written, written
    return printed, written


def test_wheel_of_its_commit_is_published(committed, upload, index):
    accepted(committed, upload, index)


def test_unknown_commit(committed, upload, index, monkeypatch, tmp_path):
    monkeypatch.setattr("wheel_check.source.ROOT", tmp_path)
    for printed in refused(committed, upload, index, tmp_path):
        assert "is not in this checkout" in printed
    for printed in accepted(committed, upload, index, "--no-strict"):
        assert "note" in printed and "is not in this checkout" in printed


def test_tree_that_had_changes(checkout, upload, index, tmp_path):
    (checkout / "causal-conv1d" / "src" / CODE).open("a").write("# not committed\n")
    (tmp_path / "dist").mkdir()
    made = convolution.build(checkout, tmp_path / "dist", None)
    for options in ([], ["--no-strict"]):
        for printed in refused(made, upload, index, tmp_path, *options):
            assert "commit the changes, then build" in printed


def test_commits_that_may_be_published(checkout, upload, index, tmp_path):
    """A wheel of a branch that nobody reviewed, and what was tagged before it."""
    git(checkout, "tag", "v1")
    git(checkout, "switch", "--quiet", "--create", "experiment")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=two")
    (tmp_path / "dist").mkdir()
    made = convolution.build(checkout, tmp_path / "dist", None)
    commit = git(checkout, "rev-parse", "HEAD")
    for printed in refused(made, upload, index, tmp_path, "--allow-commits", "main", "v1"):
        assert f"its commit {commit} cannot be reached from main or v1" in printed
    accepted(made, upload, index, "--allow-commits", "v1", "experiment")


def test_branch_that_is_not_there(committed, publish, index, tmp_path):
    status, printed = publish(committed, "--repository-url", "https://pypi.example.com", "--allow-commits", "releases")
    assert status == 1 and "--allow-commits: 'releases' is no branch, tag or commit" in printed
    status, printed = index(committed.parent, "--allow-commits", "releases")
    assert status == 1 and "--allow-commits: 'releases' is no branch, tag or commit" in printed


def test_options_that_do_not_go_together(committed, publish, capsys):
    for words, reason in (
        (["--signed-by", "A" * 40], "name its folder with --signatures"),
        (["--allow-commits", "main", str(committed)], "name the wheels first"),
    ):
        with pytest.raises(SystemExit):
            publish(committed, *words)
        assert reason in capsys.readouterr().err


@pytest.fixture
def keys(tmp_path_factory, monkeypatch):
    """keys(name) makes a signing key of that name in a keyring of its own, and returns its fingerprint."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed here")
    home = tmp_path_factory.mktemp("k")
    home.chmod(0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))

    def make(name, expires="never"):
        command = ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", name, "ed25519", "sign", expires]
        subprocess.run(command, check=True, capture_output=True)
        listed = subprocess.run(["gpg", "--list-keys", "--with-colons", name], capture_output=True, text=True).stdout
        return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))

    yield make
    subprocess.run(["gpgconf", "--kill", "all"], capture_output=True)


def test_signed_wheel_is_published(keys, committed, upload, index):
    fingerprint, other = keys("release@example.org"), keys("other@example.org")
    assert sign_wheels.main([str(committed.parent), "--sign", "release@example.org"]) == 0
    accepted(committed, upload, index, "--signatures", committed.parent)
    options = ["--signatures", committed.parent, "--signed-by"]
    assert upload(committed, *options, fingerprint)[0] == 0
    status, printed, received = upload(committed, *options, other)
    assert (status, received) == (1, {}) and f"is by the key {fingerprint}, not by {other}" in printed
    status, printed, _ = upload(committed, *options, "release@example.org")
    assert status == 1 and "is no fingerprint: give all 40 digits" in printed


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("no list", "SHA256SUMS, cannot be read"),
        ("no signature", "SHA256SUMS.asc, cannot be read"),
        ("changed list", "the list was changed after it was signed"),
        ("not listed", "does not list it, so it is not signed"),
        ("other bytes", "was signed for other bytes"),
        ("no signature's text", "is no signature of the list"),
        ("inline signature", "is no signature of the list"),
        ("unknown key", "the key is not in your keyring"),
        ("untrusted key", "which your gpg does not trust fully"),
        ("revoked key", "the key was revoked"),
        ("expired key", "the key has expired"),
    ],
)
def test_bad_signature(attack, reason, keys, committed, upload, index, tmp_path):
    dist = committed.parent
    fingerprint = keys("release@example.org")
    assert sign_wheels.main([str(dist), "--sign", fingerprint]) == 0
    listed, signature = dist / "SHA256SUMS", dist / "SHA256SUMS.asc"
    if attack == "no list":
        listed.unlink()
    elif attack == "no signature":
        assert sign_wheels.main([str(dist)]) == 0
    elif attack == "changed list":
        listed.write_text(f"{'0' * 64}  {committed.name}\n")
    elif attack in ("not listed", "other bytes"):
        text = "" if attack == "not listed" else f"{'0' * 64}  {committed.name}\n"
        listed.write_text(f"{text}{'0' * 64}  another.whl\n")
        signature.unlink()
        gpg("--armor", "--output", signature, "--detach-sign", listed)
    elif attack == "no signature's text":
        signature.write_text("signed, the release manager\n")
    elif attack == "inline signature":  # of other text, and good
        (tmp_path / "text").write_text("hello\n")
        signature.unlink()
        gpg("--armor", "--output", signature, "--sign", tmp_path / "text")
    elif attack == "unknown key":
        gpg("--yes", "--delete-secret-and-public-key", fingerprint)
    elif attack == "untrusted key":
        gpg("--import-ownertrust", input=f"{fingerprint}:3:\n")
    elif attack == "revoked key":
        certificate = Path(os.environ["GNUPGHOME"]) / "openpgp-revocs.d" / f"{fingerprint}.rev"
        certificate.write_text(certificate.read_text().replace(":-----BEGIN", "-----BEGIN"))
        gpg("--import", certificate)
    else:
        gpg("--quick-set-expire", fingerprint, "seconds=1")
        assert_expires(fingerprint)
    for printed in refused_by_signature(committed, upload, index, tmp_path, "--signatures", dist):
        assert reason in printed, printed
        assert str(dist / "SHA256SUMS") in printed


def refused_by_signature(committed, upload, index, tmp_path, *options):
    status, sent, received = upload(committed, *options)
    assert (status, received) == (1, {}), sent
    status, written = index(committed.parent, *options)
    assert status == 1 and not (tmp_path / "site" / "files").exists(), written
    return sent, written


def gpg(*words, input=None):
    command = ["gpg", "--batch", "--pinentry-mode", "loopback", "--passphrase", "", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, input=input)
    assert done.returncode == 0, done.stderr


def assert_expires(fingerprint):
    for _ in range(100):
        listed = subprocess.run(["gpg", "--list-keys", "--with-colons", fingerprint], capture_output=True, text=True)
        if any(line.startswith("pub:e") for line in listed.stdout.splitlines()):
            return
        time.sleep(0.1)
    raise AssertionError("the key does not expire")


def test_list_is_signed_as_it_was_made(keys, committed, monkeypatch):
    """Somebody changes the file between its writing and its signing."""
    fingerprint = keys("release@example.org")
    run = subprocess.run

    def exchange_and_run(command, **options):
        (committed.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {committed.name}\n")
        return run(command, **options)

    monkeypatch.setattr("sign_wheels.subprocess.run", exchange_and_run)
    assert sign_wheels.main([str(committed.parent), "--sign", fingerprint]) == 0
    monkeypatch.setattr("sign_wheels.subprocess.run", run)
    right = hashlib.sha256(committed.read_bytes()).hexdigest()
    (committed.parent / "SHA256SUMS").write_text(f"{right}  {committed.name}\n")
    assert sign_wheels.signed_hashes(committed.parent) == {committed.name: right}


def test_rebuilt_wheel_is_published(committed, upload, index):
    for printed in accepted(committed, upload, index, "--rebuild"):
        assert f"building {committed.name} again from commit" in printed


def test_rebuild_of_a_commit_that_no_branch_holds(checkout, committed, upload):
    git(checkout, "commit", "--quiet", "--amend", "--message=another")
    status, printed, received = upload(committed, "--rebuild")
    assert (status, set(received)) == (0, {committed.name}), printed


def test_wheel_that_its_commit_does_not_make(committed, upload, index, checkout, tmp_path):
    """Every file is right, and the archive was packed by somebody else."""
    other = convolution.build(checkout, tmp_path, 1_700_000_000)
    shutil.copy(other, committed)
    for printed in refused(committed, upload, index, tmp_path, "--rebuild"):
        assert "it differs: the same contents, packed in another way" in printed


def test_build_does_not_see_the_password(committed, upload, checkout, monkeypatch):
    seen = []
    run = rebuild_check.subprocess.run

    def look(command, **options):
        seen.append(options.get("env", {}))
        return run(command, **options)

    monkeypatch.setattr("rebuild_check.subprocess.run", look)
    assert upload(committed, "--rebuild")[0] == 0
    assert os.environ["TWINE_PASSWORD"] and not any("TWINE_PASSWORD" in environ for environ in seen if environ)
