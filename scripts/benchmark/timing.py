"""Timing: events, warm-up, medians, rotating inputs, and the machine's own ceilings."""

import itertools
import os
import statistics
import time

import progress
import torch

REPEATS = 20
WARM_UP = 5
L2_BYTES = 200e6  # together the input sets are several times the L2 of any GPU of today


def input_sets(make, bytes_each, most=16):
    """Enough input sets, make(0), make(1), ..., that a set has left the L2 when its turn comes again."""
    return [make(seed) for seed in range(max(1, min(most, int(L2_BYTES / bytes_each) + 1)))]


def tensor_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def gpu_milliseconds(function, sets, with_host=False):
    """Median milliseconds on the GPU of function(*set), by events.

    The GPU is kept busy while the host queues the calls, so that the host's time is not in the result; with_host: it is
    not, and where the GPU waits for the host, that is in the result.
    """
    turns = itertools.cycle(sets)
    for _ in range(max(WARM_UP, len(sets))):
        function(*next(turns))
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    if not with_host:
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
    for start, stop in events:
        start.record()
        function(*next(turns))
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def wall_microseconds(function, calls=300, rounds=7, synchronize=False):
    """Median over rounds of the host's microseconds a call, the queued GPU work included if synchronize."""
    for _ in range(50):
        function()
    times = []
    for _ in range(rounds):
        if synchronize:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if synchronize:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def graph_microseconds(function, sets, calls=128):
    """Median microseconds a call of function(*set) inside a CUDA graph: the kernel and nothing of the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for arguments in sets:
            function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _, arguments in zip(range(calls), itertools.cycle(sets), strict=False):
            function(*arguments)
    return gpu_milliseconds(graph.replay, [()]) * 1e3 / calls


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


def load():
    """The machine's load average; above the number of threads: others disturbed what was just measured."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine(device):
    """The machine in words and, on a GPU, its ceilings measured now."""
    facts = {"torch": torch.__version__, "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        source = torch.empty(1 << 29, dtype=torch.int16, device="cuda").random_()
        target = torch.empty_like(source)
        milliseconds = gpu_milliseconds(target.copy_, [(source,)])
        facts.update(
            gpu=properties.name,
            cuda=torch.version.cuda,
            multiprocessors=properties.multi_processor_count,
            copy_gb_per_s=2 * tensor_bytes([source]) / milliseconds * 1e-6,
        )
        # 16 special-function results a clock and multiprocessor; an attribute of newer torch versions, in kHz
        clock_khz = getattr(properties, "clock_rate", None) or 1_980_000
        facts["exponentials_per_s"] = properties.multi_processor_count * 16 * clock_khz * 1e3
    return facts
