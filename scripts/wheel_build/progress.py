"""What a build shows while ninja compiles: how many files are done and how long the rest takes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from . import effort
from .plan import show

# Ninja writes it before each step that has ended; nothing else in a build's output begins like this.
STATUS = {"NINJA_STATUS": "[mamba_ssm %f/%t] "}
ENDED = re.compile(r"\[mamba_ssm (\d+)/(\d+)\] (.*)")
OF_CMAKE = re.compile(r"Re-(checking globbed directories|running CMake)")  # before ninja knows all steps
LOG_SECONDS = 30.0  # the longest that a log waits for its next line; it gets one at each tenth of the work as well
# The share of the work after which the speed measured here counts as much as the table's.
TRUSTED = 0.1


@dataclass
class Progress:
    """Counts steps as they end. `weigh`: seconds of one core for a step; `cores`: how many compile.

    Where ninja first runs CMake again (a folder with the native tests does), a dry run does not see what comes after:
    then files are counted as ninja counts them, and no time is told.
    """

    steps: Sequence[str]  # those to come, by a dry run
    weigh: Callable[[str], float]
    cores: int
    done: int = 0
    total: int = field(init=False)
    work: float = field(init=False)
    work_done: float = 0.0

    def __post_init__(self) -> None:
        self.total = len(self.steps)
        self.work = sum(map(self.weigh, self.steps))

    def ended(self, step: str, done: int, total: int) -> None:
        self.done, self.total = done, total
        self.work_done = min(self.work, self.work_done + self.weigh(step))

    @property
    def share(self) -> float:
        if self.total != len(self.steps):
            return self.done / self.total
        return self.work_done / self.work if self.work else 1.0

    def left(self, elapsed: float) -> float:
        """Seconds until the end: the table's for the work left, at the speed seen so far."""
        expected = self.work / self.cores
        speed = (elapsed / expected + TRUSTED) / (self.share + TRUSTED) if expected else 1.0
        return (1 - self.share) * expected * speed

    def line(self, elapsed: float) -> str:
        if not self.total:
            return "nothing to compile: all files are as an earlier build left them"
        count = f"{self.done} of {self.total} files"
        if self.done == self.total:
            return f"{count}: done"
        return f"{count}, {effort.words(self.left(elapsed))} left" if self.total == len(self.steps) else count


@dataclass
class Reporter:
    """Shows a Progress: on a terminal one line that is rewritten, in a log a new line every so often."""

    write: Callable[[str], None]
    terminal: bool
    clock: Callable[[], float] = time.monotonic
    width: int = 0  # of the line that stands on the terminal
    last: tuple[float, int] = (0.0, -1)  # time and tenth of the log's last line

    def __post_init__(self) -> None:
        self.start = self.clock()

    def show(self, progress: Progress) -> None:
        elapsed = self.clock() - self.start
        text = progress.line(elapsed)
        if self.terminal:
            self.write("\r" + text.ljust(self.width))
            self.width = len(text)
            return
        tenth = int(progress.share * 10 + 1e-9)
        if tenth > self.last[1] or elapsed >= self.last[0] + LOG_SECONDS or progress.done == progress.total:
            self.last = (elapsed, tenth)
            self.write(text + "\n")

    def other(self, text: str) -> None:
        """A line of the compilers' own."""
        self.end()
        self.write(text + "\n")

    def end(self) -> None:
        if self.width:
            self.write("\n")
        self.width = 0


def run(architectures: int, cores: int, command: Sequence[str], env: Mapping[str, str]) -> int:
    """`cmake --build` of a folder that ninja builds; returns its exit status. What is no step is shown as it is."""
    environ = {**env, **STATUS}
    asked = subprocess.run([*command, "--", "-n"], env=environ, capture_output=True, text=True, errors="replace")
    steps = [found[3] for found in map(ENDED.fullmatch, asked.stdout.splitlines()) if found]
    files = [step for step in steps if not OF_CMAKE.match(step)]
    progress = Progress(files, lambda step: effort.of_step(step, architectures), cores)
    reporter = Reporter(lambda text: show(text, end=""), sys.stdout.isatty())
    if files or (asked.returncode == 0 and not steps):
        reporter.show(progress)
    ninja = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with ninja:
        assert ninja.stdout is not None
        for text in ninja.stdout:
            found = ENDED.fullmatch(text.rstrip("\n"))
            if found and OF_CMAKE.match(found[3]):
                continue
            if found:
                progress.ended(found[3], int(found[1]), int(found[2]))
                reporter.show(progress)
            else:
                reporter.other(text.rstrip("\n"))
        reporter.end()
    return ninja.returncode
