"""The command: examine, then say it."""

import argparse
import errno
import json
import os
import sys

from mamba_ssm._doctor import REINSTALL, files
from mamba_ssm._doctor.report import examine, render
from mamba_ssm.version import __version__


def main(arguments: list[str] | None = None) -> int:
    """Prints the report and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mamba_ssm",
        description="Checks this installation of mamba_ssm: its files, what is installed beside it, what it computes.",
        epilog="The exit code is 0 if all is well, 1 if not, 2 for wrong arguments.",
        add_help=False,  # printed below, as everything is
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with the whole of long messages")
    parser.add_argument("--kernels", action="store_true", help="list the CUDA kernels of this build and when each runs")
    options = parser.parse_args(arguments)
    if options.help:
        return _write(parser.format_help().rstrip(), 0)
    if options.version:
        return _write(f"mamba_ssm {__version__} from {files.PACKAGE}", 0)
    if options.kernels:
        try:
            from mamba_ssm._doctor import kernels
        except Exception as error:  # a file that is missing, damaged or of another version
            return _write(f"mamba_ssm cannot be imported: {type(error).__name__}: {error}. {REINSTALL}", 1)
        text, there = kernels.render()
        return _write(text, 0 if there else 1)
    report = examine()
    return _write(json.dumps(report, indent=2) if options.json else render(report), 0 if report["healthy"] else 1)


def _write(text: str, code: int) -> int:
    """Prints to the end, in any encoding. Returns the exit code: code, or 1 if nobody will read the text."""
    try:
        if sys.stdout is None:  # closed by who started Python
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        if sys.stdout is not None:  # or Python would try again when it ends, and print a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A closed pipe is EINVAL on Windows. `| head -1` has read what it wanted.
        if isinstance(error, BrokenPipeError) or (sys.platform == "win32" and error.errno == errno.EINVAL):
            return code
        if sys.stderr is not None:
            print(f"mamba_ssm: the report cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code
