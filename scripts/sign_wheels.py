"""Writes SHA256SUMS beside wheels, and on request its detached signature: python scripts/sign_wheels.py dist [--sign]

--sign [KEY] calls gpg, which holds the keys and asks for what it needs. Whoever receives the folder checks it with
`sha256sum -c SHA256SUMS` and `gpg --verify SHA256SUMS.asc SHA256SUMS`; publish.py and make_index.py check it with
--signatures FOLDER. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from terminal import say

LIST, SIGNATURE = "SHA256SUMS", "SHA256SUMS.asc"
CURE = "look at the wheels again, then sign them: python scripts/sign_wheels.py FOLDER --sign"
NO_GPG = "gpg, which is not installed here (on Debian: apt install gnupg)"
# gpg's status lines (doc/DETAILS of GnuPG). For some of them its exit status is 0.
BAD = {
    "BADSIG": f"the list was changed after it was signed, or the signature is of another list: {CURE}",
    "EXPSIG": f"the signature has expired: {CURE}",
    "EXPKEYSIG": f"the key has expired: {CURE} with a key that is valid",
    "REVKEYSIG": f"the key was revoked: {CURE} with a key that is valid",
    "NO_PUBKEY": "the key is not in your keyring: get it from a place that you trust, and gpg --import it",
    "ERRSIG": f"gpg cannot check the signature: {CURE}",
}
TRUSTED = ("TRUST_FULLY", "TRUST_ULTIMATE")


class NotSigned(Exception):
    """The list of hashes is not there, not signed or not signed by the right key; the text says why and what to do."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes SHA256SUMS for the wheels of a folder, and signs it.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the wheels are")
    parser.add_argument("--sign", nargs="?", const="", metavar="KEY", help="sign with gpg's default key, or with KEY")
    given = parser.parse_args(words)
    gpg = shutil.which("gpg")
    if given.sign is not None and gpg is None:
        parser.error(f"--sign needs {NO_GPG}")
    wheels = sorted(given.folder.glob("*.whl"))
    if not wheels:
        parser.error(f"there is no wheel in {given.folder}")

    # An old signature must not stand beside a new list, not even when gpg fails below.
    (given.folder / SIGNATURE).unlink(missing_ok=True)
    lines = "".join(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels)
    fresh = given.folder / f"{LIST}.new"
    fresh.write_text(lines, encoding="utf-8", newline="\n")
    os.replace(fresh, given.folder / LIST)
    say(*lines.splitlines())
    if given.sign is None:
        return 0
    key = ["--local-user", given.sign] if given.sign else []
    # The list as it was made, whatever is in the file by now.
    command = [gpg, "--armor", *key, "--output", SIGNATURE, "--detach-sign"]
    return subprocess.run(command, cwd=given.folder, input=lines.encode()).returncode


def signed_hashes(folder: Path, key: str | None = None) -> dict[str, str]:
    """{file name: sha256} of the list in `folder`, whose signature is good. Raises NotSigned.

    key: fingerprint of the key that must have signed, or of one of its subkeys; None for any that gpg trusts fully.
    """
    wanted = re.sub(r"\s|^0x", "", key or "").upper()
    if key and not re.fullmatch("[0-9A-F]{40}|[0-9A-F]{64}", wanted):
        raise NotSigned(f"{key!r} is no fingerprint: give all 40 digits that `gpg --fingerprint` shows")
    texts = []
    for name, what in ((LIST, "the list of hashes"), (SIGNATURE, "the signature")):
        try:
            texts.append((folder / name).read_bytes())
        except OSError as error:
            raise NotSigned(f"{what}, {folder / name}, cannot be read ({error.strerror}): {CURE}") from None
    _check_signature(*texts, wanted, folder / SIGNATURE)
    return _parse(texts[0], folder / LIST)


def _check_signature(text: bytes, signature: bytes, wanted: str, path: Path) -> None:
    gpg = shutil.which("gpg")
    if gpg is None:
        raise NotSigned(f"to check {path} needs {NO_GPG}")
    # gpg reads these copies, not files that could change between its reading and ours.
    with tempfile.TemporaryDirectory(prefix="signature-") as private:
        (Path(private) / LIST).write_bytes(text)
        (Path(private) / SIGNATURE).write_bytes(signature)
        command = [gpg, "--batch", "--no-tty", "--status-fd", "1", "--verify", SIGNATURE, LIST]
        done = subprocess.run(command, cwd=private, capture_output=True, text=True, errors="replace")
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("[GNUPG:] ")]
    wrong = [BAD[word] for word in BAD for line in lines if line[0] == word]
    signers = [{line[1], line[-1]} for line in lines if line[0] == "VALIDSIG"]
    if wrong:
        raise NotSigned(f"{path}: {wrong[0]}")
    if done.returncode != 0 or not signers:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotSigned(f"{path} is no signature of the list (gpg says: {said}): {CURE}")
    named = " and ".join(sorted(set.union(*signers)))
    if wanted and not any(wanted in signer for signer in signers):
        raise NotSigned(f"{path} is by the key {named}, not by {wanted}: {CURE}")
    if not wanted and not any(line[0] in TRUSTED for line in lines):
        raise NotSigned(
            f"{path} is by the key {named}, which your gpg does not trust fully: if it is the release key, say so with "
            "--signed-by FINGERPRINT"
        )


def _parse(text: bytes, path: Path) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *]([^/\\]+)", line)
        if match is None or match[2] in hashes:
            what = "no line of sha256sum" if match is None else f"a second line of {match[2]}"
            raise NotSigned(f"{path}, line {number}, is {what}: {CURE}")
        hashes[match[2]] = match[1]
    return hashes


if __name__ == "__main__":
    sys.exit(main())
