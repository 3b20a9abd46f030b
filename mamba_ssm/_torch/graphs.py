"""CUDA graphs of what a plan launches (plans.py).

Training repeats itself, and torch's allocator with it: from the fourth or fifth step on, the tensors of a layer lie
where they lay in the step before. What a plan launches depends on nothing but addresses, if all its memory is taken
before. So it becomes a graph when a set of addresses comes the second time, and is one call from then on. At other
addresses it is launched piece by piece as ever.

A graph is kept with the stream, too, since graphs of one stream never run at the same time: cuBLAS gives a stream one
workspace, and so do we give one to all graphs of a stream, from a pool of memory that nothing else uses.
"""

import collections
import contextlib
import ctypes
import os
import threading
import weakref

import torch

from mamba_ssm._torch import private
from mamba_ssm._torch.plan_steps import Allocation, Call, Function

DEVICE = "cuda"  # what has graphs
_FEWEST = 3  # launches that are worth a graph
_MOST_GRAPHS = 1024  # of a process; each takes some 0.1 MB of a GPU's memory
_MOST = 1024  # sets of addresses that a plan knows
_MOST_STREAMS = 4  # of a device, which have a workspace for each thread that records
_PATIENCE = 64  # see Graphs.patience
_NEVER = -1  # how often addresses came that cannot have a graph
_RECORDING = threading.Lock()
_SIDES = {}  # (device, stream) -> the stream on which its graphs are recorded, their pool of memory
_MADE: collections.deque = collections.deque()  # (the table of a graph, its key), the oldest first
_OFF = [None] if os.environ.get("MAMBA_SSM_GRAPHS", "") == "0" else []  # and one for each no_cuda_graphs that is active
_product_settings = private.product_settings


@contextlib.contextmanager
def no_cuda_graphs():
    """Within it, plans launch step by step, in all threads: for whoever counts launches."""
    _OFF.append(None)
    try:
        yield
    finally:
        _OFF.pop()


def wanted(steps, arguments):
    """Whether a plan of these steps has graphs: launches on one GPU, all into memory that can be taken before."""
    device = arguments[0].device
    if device.type != DEVICE or not private.GRAPHS_KNOWN or not private.allocates_natively():
        return False
    launches = [step for step in steps if type(step) is not Allocation]
    made = [step.made for step in launches if type(step) is Function and step.made is not None]
    made += [step for step in steps if type(step) is Allocation]
    made += [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    can = all(step.into() is not None for step in launches) and all(one.device == device for one in made)
    return can and len(launches) >= _FEWEST and any(type(step) is Call for step in launches)


class Graphs:
    """A plan's graphs, by the addresses of its tensors."""

    def __init__(self, call, device):
        self.functions, self.check, self.index = call.where[0], call.check, device.index
        self.known = {}  # (stream, settings, *addresses) -> a graph, or how often they came
        # Addresses become a graph when they come once more than so many times. Recording one costs as much as dozens of
        # calls, so where more come than a plan knows, they have to come more often after the table was cleared.
        self.patience = 1

    def launch(self, addresses, stream):
        """Launches the graph of what a plan does at these addresses: None. Without one, their key."""
        key = (stream, _product_settings(), *addresses)
        graph = self.known.get(key)
        if graph.__class__ is not _Graph or _OFF:
            return key
        return None if graph.launch(stream) else key

    def launch_steps(self, key, make):
        """make(stream) launches a plan's steps. At addresses that are due they become a graph, which is launched."""
        stream = key[0]
        if self._is_due(key):
            graph = self.known[key] = self._record(stream, make)
            if graph is not _NEVER:
                _MADE.append((weakref.ref(self), key))
                _forget_oldest()
                if graph.launch(stream):
                    return
        make(stream)

    def _is_due(self, key):
        known = self.known
        times = known.get(key, 0)
        if times.__class__ is _Graph or times == _NEVER or _OFF:
            return False
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():
                return False  # a graph of more than this: nothing may be made or freed now
        if times < self.patience:
            if len(known) >= _MOST and key not in known:
                known.clear()
                self.patience = min(2 * self.patience, _PATIENCE)
            known[key] = times + 1
            return False
        return True

    def _record(self, stream, make):
        """The graph, or _NEVER. What fails here fails again when steps are launched one by one, or does not matter."""
        handle = ctypes.c_void_p()
        with _RECORDING, torch.cuda.device(self.index):
            try:
                recorded, pool = self._side(stream)
                with torch.cuda.stream(recorded), torch.cuda.use_mem_pool(pool, self.index):
                    self._ask("graph_begin", self.index, recorded.cuda_stream)
                    try:
                        make(recorded.cuda_stream)
                    finally:
                        self._ask("graph_end", self.index, recorded.cuda_stream, ctypes.byref(handle))
            except Exception:
                if handle.value:
                    self.functions["graph_free"](handle.value)
                return _NEVER
        return _Graph(self, handle.value)

    def _side(self, stream):
        key = self.index, stream
        if key not in _SIDES:
            if sum(index == self.index for index, _ in _SIDES) >= _MOST_STREAMS:
                raise RuntimeError(f"{_MOST_STREAMS} streams of this device have graphs already")
            made = ctypes.c_void_p()
            self._ask("graph_stream", self.index, ctypes.byref(made))
            pool = torch.cuda.MemPool()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # its end may fail at exit, after an error of CUDA's
            # Not one of torch's streams, which it hands out again: nobody else's work must be recorded with ours.
            _SIDES[key] = torch.cuda.ExternalStream(made.value, self.index), pool
        return _SIDES[key]

    def _ask(self, name, *arguments):
        self.check(self.functions, name, self.functions[name](*arguments))


def _forget_oldest():
    if len(_MADE) > _MOST_GRAPHS:
        table, key = _MADE.popleft()
        graphs = table()
        if graphs is not None:
            graphs.known.pop(key, None)


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
