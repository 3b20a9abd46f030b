"""Uploads wheels to a package index: python scripts/publish.py dist/*.whl --repository-url https://pypi.example.com/

Every wheel is read once, verified (scripts/verify_wheel.py --strict) and compared by hash with what the index holds
under its name before the first is sent: the same is skipped, so a second run is harmless; other bytes are an error,
since a published file never changes. Then twine uploads the verified bytes, file by file, and the index must list each
with their hash. If anything fails, the exit status is 1, with the reason and what to do.

User name and password come from where twine takes them (TWINE_USERNAME and TWINE_PASSWORD, keyring, ~/.pypirc, else it
asks) and are never printed. The public index is refused: the name exists there, and is somebody else's.
Needs the extra: pip install "WHEEL[publish]"
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import difflib
import hashlib
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from terminal import say

try:
    import requests
    from packaging.utils import parse_wheel_filename
    from pypi_simple import (
        NoSuchProjectError,
        PyPISimple,
        UnsupportedContentTypeError,
        UnsupportedRepoVersionError,
    )
    from requests.adapters import HTTPAdapter
    from twine.commands.upload import upload
    from twine.exceptions import NonInteractive, TwineException
    from twine.repository import Repository
    from twine.settings import Settings
    from urllib3.exceptions import LocationValueError
    from urllib3.util import Retry
    from wheel_check.wheel import Wheel, find_wheels
    from wheel_gate import add_options, admit, check_options, rebuild
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name and error.name.startswith("wheel_")):
        raise
    sys.exit(
        f"publish.py needs {error.name}, which is not installed here; with the file of any wheel of mamba_ssm do: "
        'pip install "WHEEL[publish]"'
    )

PUBLIC = ("pypi.org", "pypi.io", "pypi.python.org", "testpypi.python.org")
SDISTS = (".tar.gz", ".zip")
# All in seconds. An index may list a file a while after it took it (Artifactory does that in the background).
PATIENCE = 60.0
# For the connection, TLS included; for each answer.
TIME_LIMITS = (10.0, 60.0)
SILENCE = 3.0  # a wait that lasts longer is told
CREDENTIALS = "TWINE_USERNAME and TWINE_PASSWORD, keyring or ~/.pypirc"
# What may stand before an @ in a URL that holds no user name: https://host:8080/feed@view/
WITHOUT_USER = re.compile(r"https?://(\[[\da-f:.]+\]|[^/?#@:\[\]]+)(:\d+)?[/?#].*", re.IGNORECASE)
AGAIN = "run the same command again (what is there already is skipped)"
CURES = {
    401: "user name or password is wrong: see TWINE_USERNAME and TWINE_PASSWORD, keyring, ~/.pypirc",
    403: "this user may not do that here: the password may be wrong, or the index read-only",
    404: "nothing at this URL takes uploads: give the URL for uploading, not the one that pip reads",
    405: "nothing at this URL takes uploads: a static site cannot (copy files there), an index has another URL for it",
    409: "the index holds this file name already, with other bytes: give the new build another version or label",
    413: "the file is larger than the server allows (nginx: client_max_body_size)",
    501: "nothing at this URL takes uploads: a static site cannot (copy files there), an index has another URL for it",
}


class NotPublished(Exception):
    """An upload was refused or failed; the text says why and what to do."""


class OtherBytes(NotPublished):
    """The index lists another file under the name of this one."""


class OwnSettings(Settings):
    """Twine's settings, whose connections have time limits: its own give up on a silent server after 22 minutes."""

    def create_repository(self) -> Repository:
        repository = super().create_repository()
        for scheme in ("http://", "https://"):
            repository.session.mount(scheme, Connection())
        return repository


class Connection(HTTPAdapter):
    def __init__(self) -> None:
        # Asked again is a server that is busy, none that cannot be reached.
        only = {"connect": 0, "read": 0, "other": 0, "status_forcelist": (502, 503, 504), "allowed_methods": ["GET"]}
        super().__init__(max_retries=Retry(total=2, backoff_factor=1, raise_on_status=False, **only))

    def send(self, request, timeout=None, **options):
        return super().send(request, timeout=timeout or TIME_LIMITS, **options)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says what is waited for, if the block takes longer than SILENCE."""
    timer = threading.Timer(SILENCE, lambda: say(f"waiting for {what} ...", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse_secrets_in(url: str) -> None:
    if "@" in url and not WITHOUT_USER.fullmatch(url):
        raise NotPublished(
            "the URL holds a user name or password, which process lists and logs show: take it out and use "
            + CREDENTIALS
        )
    if "?" in url or "#" in url:
        raise NotPublished(
            "the URL holds a query or fragment (from ? or # on), where an index has none and a token would be shown: "
            f"take it out; a token goes where a password does, {CREDENTIALS}"
        )


def read_settings(options: argparse.Namespace) -> Settings:
    """Twine's own settings: its environment variables and files, and where to upload. Raises NotPublished."""
    parser = argparse.ArgumentParser()
    Settings.register_argparse_arguments(parser)
    # Twine's default is the public index; ours is none.
    parser.set_defaults(repository=os.environ.get("TWINE_REPOSITORY"))
    words = []
    for name in ("repository", "repository_url", "config_file"):
        if getattr(options, name):
            words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    # Where nobody can answer, a missing password is an error instead of a question.
    if sys.stdin is None or not sys.stdin.isatty():
        words.append("--non-interactive")
    parsed = parser.parse_args(words)
    if not parsed.repository_url and not parsed.repository:
        raise NotPublished("no index is named: give --repository-url, or --repository with a name in ~/.pypirc")
    for word in (parsed.repository_url, parsed.repository, options.index_url):
        refuse_secrets_in(word or "")
    settings = OwnSettings.from_argparse(parsed)
    url = settings.repository_config["repository"]
    refuse_secrets_in(url)
    host = (urlsplit(url).hostname or "").rstrip(".")
    if not options.allow_public_index and any(host == name or host.endswith(f".{name}") for name in PUBLIC):
        raise NotPublished(
            f"{host} is the public index, where our names are those of other projects: pip would mix them. Give "
            "the URL of your own index (--allow-public-index is for whoever owns the name there)"
        )
    return settings


class Index:
    """The index as pip sees it, read with twine's credentials."""

    def __init__(self, settings: Settings, index_url: str | None) -> None:
        self.url = settings.repository_config["repository"].rstrip("/")
        # Where an index that takes uploads at URL is read: most; devpi; those that end in a word for uploading.
        guesses = [f"{self.url}/simple", f"{self.url}/+simple"]
        if self.url.endswith(("/upload", "/legacy")):
            guesses.append(f"{self.url.rpartition('/')[0]}/simple")
        self.pages = [index_url.rstrip("/")] if index_url else guesses
        self.session = settings.create_repository().session
        for what, word in zip(("user name", "password"), self.session.auth or (), strict=False):
            if not _is_latin_1(word):
                raise NotPublished(
                    f"the {what} has a character that is not Latin-1, and twine cannot send such: choose one of ASCII "
                    "characters, or a token of the index"
                )

    def holds(self, wheel: Wheel) -> bool:
        """Whether the index lists these very bytes. Raises OtherBytes if it lists others under this name."""
        unreadable = []
        for page in self.pages:
            try:
                packages = self._packages(page, wheel)
            except NotPublished as error:
                unreadable.append(error)
                continue
            for listed in packages:
                if listed.filename == wheel.path.name:
                    self._compare(listed.digests, wheel)
                    return True
        # An index may answer a wrong guess with any error, as long as it answers the right one.
        if len(unreadable) == len(self.pages):
            raise unreadable[0]
        return False

    def _packages(self, page: str, wheel: Wheel) -> list:
        project = parse_wheel_filename(wheel.path.name)[0]
        try:
            with waiting(f"{page}/ to answer"):
                return PyPISimple(page, session=self.session).get_project_page(project).packages
        except (NoSuchProjectError, UnsupportedContentTypeError):
            return []
        except requests.HTTPError as error:
            raise NotPublished(f"{page} cannot be read: {explain(error)}") from error
        except (requests.ConnectionError, requests.Timeout) as error:
            plain = page.lower().startswith("https:") and "CERTIFICATE" not in str(error)
            hint = ". If this server speaks plain http, its URL begins with http://" if plain else ""
            raise NotPublished(f"{page} cannot be reached: {explain(error)}{hint}") from error
        except (requests.RequestException, ValueError, UnsupportedRepoVersionError) as error:
            raise NotPublished(f"{page} is no index page that could be read: {explain(error)}") from error

    def _compare(self, digests: dict[str, str], wheel: Wheel) -> None:
        for algorithm in ("sha256", *digests):
            if algorithm in digests:
                own = hashlib.new(algorithm, wheel.data).hexdigest()
                if own == digests[algorithm].lower():
                    return
                raise OtherBytes(
                    f"{wheel.path.name} is on the index with other bytes ({algorithm} {digests[algorithm]}, this file "
                    f"has {own})"
                )
        raise NotPublished(
            f"{wheel.path.name} is on the index, which gives no hash of it: nobody can tell whether it is this file"
        )


def _is_latin_1(word: str) -> bool:
    try:
        word.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True


def explain(error: Exception) -> str:
    """The reason in one line, with the cure where it is known."""
    response = getattr(error, "response", None)
    if response is not None:
        cure = CURES.get(response.status_code)
        return f"status {response.status_code} {response.reason or ''}".rstrip() + (f" ({cure})" if cure else "")
    # Their texts show what could not be parsed, such as half of a proxy's password.
    if isinstance(error, (requests.exceptions.InvalidURL, LocationValueError)):
        return (
            f"{type(error).__name__}: check the URL, and HTTP_PROXY and HTTPS_PROXY (in a proxy's user name and "
            "password, write / ? # @ and : as %2F %3F %23 %40 and %3A)"
        )
    cure = ""
    if isinstance(error, NonInteractive):
        cure = f" Use {CREDENTIALS}"
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        cure = ". If your own authority signed the server's certificate, name its file in TWINE_CERT"
    return (str(error) or type(error).__name__) + cure


def upload_bytes(wheel: Wheel, settings: Settings) -> None:
    """Twine reads a path, more than once: one in a folder that only this user can enter."""
    with tempfile.TemporaryDirectory(prefix="publish-") as private:  # mode 0700
        copy = Path(private) / wheel.path.name
        try:
            copy.write_bytes(wheel.data)
        except OSError as error:
            raise NotPublished(f"{copy} cannot be written ({error.strerror}): name another folder in TMPDIR") from error
        upload(settings, [str(copy)])


def send(wheel: Wheel, settings: Settings, index: Index) -> None:
    """Uploads one file and sees it listed. Raises NotPublished, which says what is on the index now."""
    name = wheel.path.name
    try:
        upload_bytes(wheel, settings)
    except (requests.RequestException, TwineException) as error:
        reason = f"uploading {name} to {index.url} failed: {explain(error)}\n"
        try:
            if index.holds(wheel):
                return  # the answer was lost, the file was not
        except NotPublished as unknown:
            raise NotPublished(f"{reason}What is on the index now: {unknown}\nThen {AGAIN}") from error
        raise NotPublished(f"{reason}The index lists nothing of this file. When the cause is gone, {AGAIN}") from error
    deadline = time.monotonic() + PATIENCE
    with waiting(f"the index to list {name}"):
        while not holds_what_was_sent(wheel, index):
            if time.monotonic() > deadline:
                raise NotPublished(
                    f"the server took {name}, and {' and '.join(index.pages)} did not list it for "
                    f"{PATIENCE:.0f} s: if pip reads this index elsewhere, say where with --index-url; then {AGAIN}"
                )
            time.sleep(1)


def holds_what_was_sent(wheel: Wheel, index: Index) -> bool:
    try:
        return index.holds(wheel)
    except OtherBytes as error:
        raise NotPublished(
            f"{error}, right after this file was sent: the server, or somebody with access to it, changed the file. "
            "Delete it there, and find out who"
        ) from error


def publish(wheels: list[Path], options: argparse.Namespace) -> Iterator[str]:
    """Does everything; yields a line for each file, before that its notes. Raises NotPublished."""
    problems = [
        f"{wheel}: an sdist does not belong on the index: pip would build it where no wheel fits"
        for wheel in wheels
        if wheel.name.endswith(SDISTS)
    ]
    try:
        settings = read_settings(options)
        index = Index(settings, options.index_url)
    except TwineException as error:
        raise NotPublished(explain(error)) from error
    except configparser.Error as error:  # its text shows the line, which may be the password's
        raise NotPublished(f"{options.config_file or '~/.pypirc'} is malformed: {type(error).__name__}") from None
    outcome = admit([wheel for wheel in wheels if not wheel.name.endswith(SDISTS)], options)
    yield from (f"note: {note}" for note in outcome.notes)
    if problems or outcome.problems:
        raise NotPublished("\n".join([*problems, *outcome.problems]))
    try:
        missing = {wheel.path.name for wheel in outcome.wheels if not index.holds(wheel)}
    except OtherBytes as error:
        raise NotPublished(
            f"{error}. A published file never changes: give the new build another version or label. If the file there "
            "is damaged, delete it there first"
        ) from error
    if problems := rebuild(outcome.wheels, options):
        raise NotPublished("\n".join(problems))
    for wheel in outcome.wheels:
        name = wheel.path.name
        if name in missing:
            send(wheel, settings, index)
        yield f"{'published' if name in missing else 'already there'}: {name}"


class Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exits, without the word that argparse would show."""
        super().error(re.sub("ignored explicit argument .*", "takes no value", message, flags=re.DOTALL))


def read_words(words: list[str] | None) -> argparse.Namespace:
    """The command line. No word that is not understood is shown: it may be a password."""
    description = "Verifies wheels of mamba_ssm and uploads them to a package index."
    parser = Words(description=description, allow_abbrev=False)
    parser.add_argument("wheels", nargs="+", metavar="WHEEL", help="such as dist/*.whl")
    parser.add_argument("--repository-url", metavar="URL", help="where to upload to (or TWINE_REPOSITORY_URL)")
    parser.add_argument("--repository", metavar="NAME", help="a section of ~/.pypirc instead (or TWINE_REPOSITORY)")
    parser.add_argument("--config-file", metavar="FILE", help="a file in place of ~/.pypirc")
    parser.add_argument(
        "--index-url", metavar="URL", help="where pip reads the index, if not at URL/simple/ or URL/+simple/"
    )
    parser.add_argument("--allow-public-index", action="store_true", help="upload to pypi.org or test.pypi.org too")
    add_options(parser)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        known = [f"--{name.replace('_', '-')}" for name in vars(options)]
        meant = {match for word in unknown for match in difflib.get_close_matches(word.partition("=")[0], known, n=1)}
        hint = f"did you mean {' '.join(sorted(meant))}? " if meant else ""
        parser.error(f"unknown options ({hint}see --help); user name and password come from {CREDENTIALS}")
    check_options(parser, options)
    if any("://" in word for word in options.wheels):
        parser.error("a URL stands where a wheel is expected: name the index with --repository-url")
    if not all(word.endswith((".whl", *SDISTS)) for word in options.wheels):
        parser.error("a word that does not end in .whl stands where a wheel is expected (see --help)")
    return options


def main(words: list[str] | None = None) -> int:
    options = read_words(words)
    # It advises an option of its own command line.
    logging.getLogger("twine.utils").setLevel(logging.ERROR)
    try:
        for line in publish(find_wheels(options.wheels), options):
            say(line)
    except NotPublished as error:
        say("not published:", *str(error).split("\n"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; to finish, {AGAIN}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
