"""CUDA graphs of what a plan launches (plans.py).

Training repeats itself, and torch's allocator with it: from the fourth or fifth step on, the tensors of a layer lie
where they lay in the step before. What a plan launches depends on nothing but addresses, if all its memory is taken
before. So it becomes a graph when a set of addresses comes the second time, and is one call from then on. At other
addresses it is launched piece by piece as ever.

A graph is kept with the stream, too, since graphs of one stream never run at the same time: cuBLAS gives a stream one
workspace, and so do we give one to all graphs of a stream, from a pool of memory that nothing else uses.
"""

import contextlib
import ctypes
import os
import threading

import torch

from mamba_ssm._torch import private
from mamba_ssm._torch.plan_steps import Allocation, Call, Function

DEVICE = "cuda"  # what has graphs
_FEWEST = 3  # launches that are worth a graph
_MOST = 1024  # sets of addresses that a plan knows
_MOST_STREAMS = 16  # which each have a workspace
_PATIENCE = 64  # see Graphs.patience
_NEVER = -1  # how often addresses came that have no graph
_RECORDING = threading.Lock()
_SIDES = {}  # (device, stream) -> the stream on which its graphs are recorded, their pool of memory
_OFF = [None] if os.environ.get("MAMBA_SSM_GRAPHS", "") == "0" else []  # and one for each no_graphs that is active
_product_settings = private.product_settings


@contextlib.contextmanager
def no_graphs():
    """Within it, everything is launched one by one, in all threads: for whoever counts launches."""
    _OFF.append(None)
    try:
        yield
    finally:
        _OFF.pop()


def wanted(steps, device):
    """Whether a plan of these steps has graphs: launches on a GPU, all into memory that can be taken before."""
    if device.type != DEVICE or not private.POOLS_KNOWN:
        return False
    launches = [step for step in steps if type(step) is not Allocation]
    made = [step.made for step in launches if type(step) is Function and step.made is not None]
    made += [step for step in steps if type(step) is Allocation]
    can = all(step.into() is not None for step in launches) and all(one.device == device for one in made)
    return can and len(launches) >= _FEWEST and any(type(step) is Call for step in launches)


class Graphs:
    """A plan's graphs, by the addresses of its tensors."""

    def __init__(self, call, device):
        self.functions, self.check, self.index = call.where[0], call.check, device.index
        self.known = {}  # (stream, settings, *addresses) -> a graph, or how often they came
        # Addresses become a graph when they have come so often before. Recording one costs as much as dozens of calls,
        # so where more come than a plan knows, they have to come more often before the table is cleared.
        self.patience = 1

    def launch(self, addresses, stream):
        """Launches what a plan does at these addresses, if that is a graph or becomes one: None. Else their key."""
        key = (stream, _product_settings(), *addresses)
        graph = self.known.get(key)
        if graph.__class__ is not _Graph or _OFF:
            return key
        return None if graph.launch(stream) else key

    def launch_steps(self, key, make):
        """make(stream) launches a plan's steps: if these addresses are due, on another stream, which makes a graph."""
        stream = key[0]
        if self._is_due(key):
            graph = self.known[key] = self._record(stream, make)
            if graph is not _NEVER and graph.launch(stream):
                return
        make(stream)

    def _is_due(self, key):
        known = self.known
        times = known.get(key, 0)
        if times.__class__ is _Graph or times == _NEVER or key[1] is None or _OFF:
            return False
        if times >= self.patience:  # not while a graph of more than this is recorded: nothing may be made then
            with torch.cuda.device(self.index):
                return not torch.cuda.is_current_stream_capturing()
        if len(known) >= _MOST and key not in known:
            known.clear()
            self.patience = min(2 * self.patience, _PATIENCE)
        known[key] = times + 1
        return False

    def _record(self, stream, make):
        with _RECORDING:
            side = self._side(stream)
            if side is None:
                return _NEVER
            recorded, pool = side
            handle = ctypes.c_void_p()
            with torch.cuda.stream(recorded), torch.cuda.use_mem_pool(pool, self.index):
                if self.functions["graph_begin"](self.index, recorded.cuda_stream):
                    return _NEVER
                try:
                    make(recorded.cuda_stream)
                finally:
                    failed = self.functions["graph_end"](self.index, recorded.cuda_stream, ctypes.byref(handle))
            return _NEVER if failed else _Graph(self, handle.value)

    def _side(self, stream):
        key = self.index, stream
        if key not in _SIDES and len(_SIDES) < _MOST_STREAMS:
            made = ctypes.c_void_p()
            code = self.functions["graph_stream"](self.index, ctypes.byref(made))
            self.check(self.functions, "graph_stream", code)
            # Not one of torch's own, which it hands out again: other work must not be recorded with ours.
            _SIDES[key] = torch.cuda.ExternalStream(made.value, self.index), torch.cuda.MemPool()
        return _SIDES.get(key)


class _Graph:
    def __init__(self, graphs, handle):
        self.index, self.handle, self.check = graphs.index, handle, graphs.check
        self.functions, self.run = graphs.functions, graphs.functions["graph_launch"]
        self.lock = threading.Lock()

    def launch(self, stream):
        """False if the stream's work is being recorded, for a graph of the whole step, say."""
        with self.lock:
            code = self.run(self.index, self.handle, stream)
        if not code:
            return True
        with contextlib.suppress(NotImplementedError):
            self.check(self.functions, "graph_launch", code)
        return False

    def __del__(self):
        self.functions["graph_free"](self.handle)
