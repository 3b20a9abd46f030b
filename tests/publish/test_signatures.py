"""--signatures: only what the release key signed is published."""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
import sign_wheels


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


def test_signed_wheel_is_published(keys, committed, gate):
    fingerprint, other = keys("release@example.org"), keys("other@example.org")
    assert sign_wheels.main([str(committed.parent), "--sign", "release@example.org"]) == 0
    gate.accepts(committed, "--signatures", committed.parent)
    options = ["--signatures", committed.parent, "--signed-by"]
    assert gate.upload(committed, *options, fingerprint)[0] == 0
    status, printed, received = gate.upload(committed, *options, other)
    assert (status, received) == (1, {}) and f"is by the key {fingerprint}, not by {other}" in printed
    status, printed, _ = gate.upload(committed, *options, "release@example.org")
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
def test_bad_signature(attack, reason, keys, committed, gate, tmp_path):
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
    for printed in gate.refuses(committed, "--signatures", dist):
        assert reason in printed, printed
        assert str(dist / "SHA256SUMS") in printed


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
