"""Timing inside a process: the modes on a GPU, the one on a CPU, and the machine's ceilings."""

import itertools
import math
import statistics
import time

import progress
import torch
from problems.common import tensor_bytes
from torch.autograd import DeviceType

WARM_UP = 3
BUDGET = 1.0  # seconds that one round of repetitions may take; at least one is made
SHORT = 1e-3  # seconds: shorter calls are timed several at once, or the events themselves would count
MOST_AT_ONCE = 32  # the GPU's queue holds about a thousand kernels, and the host waits where it is full
LEAD = 2.0  # times the host's time for a call that the GPU is kept from beginning it
MOST_LEAD = 0.25  # seconds
PROFILED = 2  # calls of a round: reading what the profiler recorded takes longer than a call
SLEEP_CYCLES = 2e9  # a second's, at the highest clock or above


class Stopwatch:
    """Times calls that take turns.

    Mode "gpu": only the GPU's time, its queue kept full; "busy": the same of a call that its queue does not hold, by
    torch's profiler; any other: the host's time too, from an idle GPU on.
    """

    def __init__(self, calls, mode, device):
        self.turns = itertools.cycle(calls)
        self.mode, self.device = mode, device
        _times(lambda: next(self.turns)(), max(WARM_UP, len(calls)))  # also compiles what compiles at the first call
        self.host, self.whole = map(min, zip(*_times(self._one_call, 3), strict=True))
        self.at_once = max(1, min(MOST_AT_ONCE, int(SHORT / self.whole))) if mode == "gpu" else 1
        self.lead = min(MOST_LEAD, LEAD * self.host * self.at_once)

    def _one_call(self):
        """(the host's seconds until a call returns, seconds until it has also ended on the GPU)."""
        self._wait()
        start = time.perf_counter()
        next(self.turns)()
        host = time.perf_counter() - start
        self._wait()
        return host, time.perf_counter() - start

    def _wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def times(self, repeats):
        """(seconds of each repetition, whether the GPU had to wait for the host)."""
        cost = self.whole * self.at_once + (self.lead if self.mode == "gpu" else 0.0)
        repeats = max(1, min(repeats, int(BUDGET / cost)))
        if self.mode == "busy":
            return [self._busy() for _ in range(min(PROFILED, repeats))], False
        if self.mode != "gpu" or self.device == "cpu":
            return [self._from_idle() for _ in range(repeats)], False
        while True:
            found = [self._kept_full() for _ in range(repeats)]
            dry = any(dry for _, dry in found)
            if not dry or self.lead >= MOST_LEAD:
                return [seconds for seconds, _ in found], dry
            self.lead = min(MOST_LEAD, 2 * self.lead)

    def _from_idle(self):
        """Until the call's last kernel has ended; by the GPU's clock where there is one."""
        call = next(self.turns)
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3

    def _busy(self):
        """Seconds in which the GPU worked at a call, gaps between its kernels left out."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            next(self.turns)()
            torch.cuda.synchronize()
        return covered(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and not _is_annotation(event)
        )

    def _kept_full(self):
        """(seconds of a call, whether the queue ran dry): the GPU sleeps until the host has queued all of it."""
        calls = [next(self.turns) for _ in range(self.at_once)]
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(self.lead * SLEEP_CYCLES))
        start.record()
        for call in calls:
            call()
        stop.record()
        dry = start.query()  # the GPU began before all was queued, so it may have waited for the host
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / self.at_once, dry


def _times(function, most):
    """What function() returns, `most` times or until they took half the budget."""
    results, start = [function()], time.perf_counter()
    while len(results) < most and time.perf_counter() - start < BUDGET / 2:
        results.append(function())
    return results


def _is_annotation(event):
    """The GPU's track also has ranges such as the optimizer's step, gaps included; before torch 2.6 unmarked."""
    return getattr(event, "is_user_annotation", False) or event.name.startswith(("Optimizer.", "ProfilerStep"))


def covered(intervals):
    """The seconds that intervals (start, end), in microseconds, cover together; where they overlap, once."""
    total, last = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    if not total:
        raise RuntimeError("torch's profiler recorded no kernels: the GPU's time alone cannot be told")
    return total * 1e-6


def ceilings():
    """What this GPU can do, a second, measured now: {"copy": bytes, "exp": exponentials, "tensor": operations}."""

    def seconds(call):
        return statistics.median(Stopwatch([call], "gpu", "cuda").times(10)[0])

    source = torch.empty(1 << 29, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * tensor_bytes([source]) / seconds(lambda: target.copy_(source))
    matrix = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    tensor = 2 * 8192**3 / seconds(lambda: matrix @ matrix)
    properties = torch.cuda.get_device_properties(0)
    # 16 special-function results a clock and multiprocessor; the clock is an attribute of newer torch versions, in kHz
    clock = (getattr(properties, "clock_rate", None) or 1_980_000) * 1e3
    return {"copy": copy, "exp": properties.multi_processor_count * 16 * clock, "tensor": tensor}


def cpu_seconds(what, function, repeats, warm_up=True, clock=time.perf_counter):
    """Median seconds of function() on the CPU; clock: time.process_time for the time that the process had the CPU."""
    if warm_up:
        progress.show(what, "(warm-up)")
        function()
    times = []
    for turn in range(repeats):
        progress.show(what, f"({turn + 1} of {repeats})")
        start = clock()
        function()
        times.append(clock() - start)
    return statistics.median(times)
