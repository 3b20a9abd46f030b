"""Texts out of a wheel on the terminal: none of them hides or adds a line there, and none ends the program."""

import io
import json
import zipfile

import _helpers.publish_extra  # noqa: F401  (skips where the scripts could not be imported)
import pytest
import verify_wheel
from terminal import say
from wheel_build import finish


def change(wheel, end, edit):
    """The wheel with the file whose name ends so edited, in its place; RECORD knows nothing of it."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in files if name.endswith(end))
    finish.pack({**files, name: edit(files[name])}, wheel, 0)


def version(text):
    def edit(old):
        document = json.loads(old)
        document["metadata"]["component"]["version"] = text
        return json.dumps(document).encode()

    return edit


@pytest.mark.parametrize(
    ("end", "edit", "shown"),
    [
        ("/RECORD", lambda old: old + b"\x1b[1A\x1b[2Kok,,\n" * 2, "names \\x1b[1A\\x1b[2Kok twice"),
        ("/RECORD", lambda old: old + b"a\rfit to publish,,\n" * 2, "names a\\rfit to publish twice"),
        ("/RECORD", lambda old: old + "\u202e\x9b2K,,\n".encode() * 2, "names \\u202e\\x9b2K twice"),
        (".cdx.json", version("\ud800"), "is of version \\ud800"),
        (".cdx.json", version("1\nx.whl: fit to publish"), "is of version 1\\nx.whl: fit to publish"),
    ],
)
def test_text_of_a_wheel_is_escaped(committed, gate, capsys, end, edit, shown):
    change(committed, end, edit)
    said = [*gate.refuses(committed)]
    assert verify_wheel.main([str(committed)]) == 1
    for printed in (*said, capsys.readouterr().out):
        assert shown in printed
        assert all(line.isprintable() for line in printed.split("\n"))
        assert not any(line.startswith("x.whl") for line in printed.split("\n"))


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"\\xe9\\u4e2d"), ("cp1252", b"\xe9\\u4e2d"), ("utf-8", None)]
)
def test_letter_that_the_terminal_lacks(encoding, shown):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    say("\xe9\u4e2d", "\t", file=terminal)
    assert terminal.buffer.getvalue() == (shown or "\xe9\u4e2d".encode()) + b"\n\\t\n"
