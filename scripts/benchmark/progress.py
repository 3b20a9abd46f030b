"""What is being measured now, on stderr: one line, rewritten, on a terminal; elsewhere a line for each step."""

import sys
import time

COLUMNS = 120
AGAIN = 10  # seconds after which a step that repeats is said again where lines are not rewritten

_start = time.perf_counter()
_section = ""  # stays empty in a process that measures for another one, which adds the section and the time
_last = ("", 0.0)


def section(name):
    """What the next steps belong to."""
    global _section
    _section = name


def show(step, count=""):
    """Say which step begins and, where it repeats, which time."""
    global _last
    now = time.perf_counter() - _start
    text = f"[{now:.0f} s] {_section}: {step} {count}" if _section else f"{step} {count}"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text.rstrip()[: COLUMNS - 1]}", end="", file=sys.stderr, flush=True)
    elif step != _last[0] or now - _last[1] > AGAIN:
        print(text.rstrip(), file=sys.stderr, flush=True)
        _last = (step, now)


def clear():
    """Take the line away, before something else is printed."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
