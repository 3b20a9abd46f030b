"""The two sides as the driver sees them: each a worker process, asked by lines of JSON within a time limit."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time

import progress

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
START_LIMIT = 120.0  # seconds: importing torch and the package
LINES_OF_ERROR = 20


class Failed(Exception):
    """A side could not do what it was asked for; says why."""


class Process:
    """One side. folders: where the peer's packages lie, none for ours. limit: the seconds of one command.

    without: kernels that its calls pass over.
    """

    def __init__(self, name, device, folders=(), limit=120.0, without=""):
        self.name, self.limit = name, limit
        self.words = [sys.executable, SCRIPT, device, without, *folders]
        self.environment = dict(os.environ)
        if folders:
            path = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
            self.environment["PYTHONPATH"] = os.pathsep.join(path)
        self.process = None

    def start(self):
        """facts: what the process says of itself and of its packages."""
        self.said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until stop
        self.process = subprocess.Popen(
            self.words,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            encoding="utf-8",
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True).start()
        self.send("hello")
        self.facts = self.receive(f"{self.name}: starting", limit=START_LIMIT)

    @staticmethod
    def _read(stream, lines):
        for line in stream:
            lines.put(line)
        lines.put("")  # the process has ended

    def send(self, command, **arguments):
        """Ask; started where it is not running, at first or after it was stopped."""
        if self.process is None:
            self.start()
        with contextlib.suppress(OSError):  # it has ended, which receive says
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()

    def receive(self, step, limit=None):
        """The answer; step is what the progress line says meanwhile. Raises Failed."""
        limit = limit or self.limit
        begin = time.monotonic()
        while True:
            progress.show(step)
            try:
                line = self.lines.get(timeout=min(1.0, limit))
                break
            except queue.Empty:
                if time.monotonic() - begin > limit:
                    self.stop()
                    raise Failed(f"took more than {limit:.0f} s (--limit)") from None
        if not line:
            code, said = self.process.wait(), self._last_words()
            self.stop()
            raise Failed(f"its process ended with {code}\n{said}".rstrip())
        reply = json.loads(line)
        if "failed" in reply:
            raise Failed("\n".join([reply["failed"], *filter(None, [reply.get("traceback")])]).rstrip())
        return reply

    def ask(self, step, command, **arguments):
        self.send(command, **arguments)
        return self.receive(step)

    def _last_words(self):
        self.said.seek(0)
        return "".join(self.said.readlines()[-LINES_OF_ERROR:])

    def stop(self):
        """End the process; the next command starts another one."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # what it was not told any more
            self.process.stdin.close()
        self.said.close()
        self.process = None


class Sides:
    """ours, and the peer where there is one; on leaving the with block all processes are ended."""

    def __init__(self, device, peer=(), limit=120.0, without=""):
        self.ours = Process("ours", device, (), limit, without)
        self.all = [self.ours, *([Process("peer", device, peer, limit)] if peer else [])]
        self.second = Process("", device, (), limit)  # ours too, for cases that are compared with others of ours

    def of(self, case):
        """{name: (process, the case that it measures)}; a process starts when it is first asked."""
        if case.beside == "peer":
            return {side.name: (side, case) for side in self.all}
        self.second.name = case.beside
        return {"ours": (self.ours, case), case.beside: (self.second, case.other())}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for side in [*self.all, self.second]:
            side.stop()
