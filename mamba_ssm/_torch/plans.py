"""Plans: what a call did, kept for later calls like it, which then skip checks, layout and filling records.

A small call is bound by the host's time. Most operators only look at their tensors, allocate, copy those whose strides
kernels do not take, and call native functions with a struct each. So the second call of a kind is recorded: what it
allocated, and which of a struct's pointers lie in which argument or allocation. Later calls of that kind allocate the
same, write the new addresses into copies of the structs, and call the functions. A call that did more has no plan.

Calls are of one kind if all that an implementation can see is the same: options, the number of threads, what else the
operator says that it reads, and of each tensor the shape, strides, dtype, device and alignment. An implementation that
looks at values calls `look_at_values`. Plans hold no tensor, and threads share them. They are not used while something
watches operators (see dispatch.watched), so that compilers and tracers never meet one. Whoever changes what native
functions answer calls `forget`.
"""

import ctypes
import math
import threading

import torch

from mamba_ssm._torch.private import MODES_KEEP_INFERENCE, DispatchMode, current_stream, pop_mode, push_mode

_MOST = 256  # kinds of calls of one operator: the lengths of texts may all differ
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_NO_TENSORS = {type(None), bool, int, float}
_NEVER = -math.inf  # how often a kind came that has no plan
_PATIENCE = 64  # see Planned.patience
_ALIGNMENT = 16  # the most that kernels read at once
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_COPIES = {"clone", "contiguous"}  # the latter in inference mode, where it is an operator of its own
_VIEWS = {
    "alias",
    "as_strided",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
}
_VIEWS_IF_POSSIBLE = {"flatten", "reshape"}  # in inference mode, where they are operators of their own
_empty_strided, _empty_like, _num_threads = torch.empty_strided, torch.empty_like, torch.get_num_threads
_increment_version = torch.autograd.graph.increment_version

FORGOTTEN = [0]  # how often forget was called
_RECORDERS = {}  # thread -> its recorder, while there is one
_TABLES = []


class Planned:
    """An operator's implementation, by a plan where there is one."""

    def __init__(self, implementation, reads):
        self.implementation = implementation
        self.reads = reads  # functions of no arguments, whose results are what else the implementation depends on
        self.plans = {}  # kind of call -> its plan, or how often it came
        # A kind is recorded when it has come so often. Recording costs as much as a plan saves in some 50 calls, so
        # where there are more kinds than a table holds, it has to pay each time before the table is cleared.
        self.patience = 1
        _TABLES.append(self)

    def __call__(self, arguments):
        """The results; None of calls that are not planned."""
        key, addresses = [_num_threads(), arguments[0].device], []
        for read in self.reads:
            key.append(read())
        for argument in arguments:
            kind = type(argument)
            if kind is _TENSOR or kind is _PARAMETER:
                address = argument.data_ptr()
                key += (
                    argument.shape,
                    argument.is_contiguous() or argument.stride(),
                    argument.dtype,
                    argument.get_device(),
                    address % _ALIGNMENT if address else None,  # None: of what has no memory, as on the meta device
                    argument.is_neg(),
                )
                addresses.append(address)
            elif kind in _NO_TENSORS:
                key.append(argument)
                addresses.append(None)
            else:
                return None
        key, plans = tuple(key), self.plans  # these plans: another thread may forget them, and then this call's too
        plan = plans.get(key, 0)
        if plan.__class__ is Plan:
            for first, other, distance in plan.overlaps:
                if addresses[other] - addresses[first] != distance:
                    return self.implementation(*arguments)
            return plan.run(arguments, addresses)
        if plan == 0 and not are_plain(arguments):
            return None
        if plan >= self.patience and (MODES_KEEP_INFERENCE or not torch.is_inference_mode_enabled()):
            results, plan = _record(self.implementation, arguments)
        else:
            results, plan = self.implementation(*arguments), plan + 1
        if len(plans) >= _MOST and key not in plans:
            plans.clear()
            self.patience = min(2 * self.patience, _PATIENCE)
        plans[key] = plan
        return results


def are_plain(arguments):
    """Whether every tensor is one that an implementation may see as it is: no subclass, on CPU or CUDA, and not a view
    whose negation is still to be done (the imaginary part of a conjugate).
    """
    for argument in arguments:
        kind = type(argument)
        if kind is _TENSOR or kind is _PARAMETER:
            if argument.is_neg() or not (argument.is_cuda or argument.is_cpu):
                return False
        elif kind not in _NO_TENSORS and isinstance(argument, _TENSOR):
            return False
    return True


def forget():
    """Drops all plans, and those that calls are making now: for whoever has changed what the native functions of a
    process do. Sequences compare FORGOTTEN.
    """
    FORGOTTEN[0] += 1
    for planned in _TABLES:
        planned.plans, planned.patience = {}, 1


# ---- a plan ----------------------------------------------------------------------------------------------------------


class Plan:
    """What calls of one kind do."""

    def __init__(self, calls, made, arguments, results, written):
        # (an argument, another that holds some of the same memory, which the plan counts as the first's, bytes from
        # start to start): the plan is for calls with the same
        self.overlaps = set()
        self.made = [_recipe(tensor, source, arguments, self.overlaps) for tensor, source in made]
        made = [tensor for tensor, _ in made]
        self.calls = [_Call(call, made, arguments, self.overlaps) for call in calls]
        self.idle = []  # structs that no call is using: threads share plans
        self.index = arguments[0].get_device()
        self.results_of = _results_of(results, made)
        self.written = [_argument_of(tensor, arguments, self.overlaps) for tensor in written]

    def run(self, arguments, addresses):
        try:
            structs = self.idle.pop()
        except IndexError:
            structs = [call.struct() for call in self.calls]
        made = []
        for copied, like, shape, strides, dtype, device in self.made:
            if copied is not None:
                made.append(arguments[copied].contiguous())
            elif like is not None:
                made.append(_empty_like(arguments[like]))
            else:
                made.append(_empty_strided(shape, strides, dtype=dtype, device=device))
        stream = None if self.index < 0 else current_stream(self.index)
        for call, (params, words) in zip(self.calls, structs, strict=True):
            if stream is not None:
                words[call.stream] = stream
            for word, source, offset in call.given:
                words[word] = addresses[source] + offset
            for word, source, offset in call.new:
                words[word] = made[source].data_ptr() + offset
            code = call.function(params)
            if code:
                call.check(*call.where, code)
        for source in self.written:
            if not arguments[source].is_inference():
                _increment_version(arguments[source])
        self.idle.append(structs)
        return self.results_of(made)


class _Call:
    """A native call of a plan."""

    def __init__(self, call, made, arguments, overlaps):
        functions, name, params, self.check = call
        self.function, self.where = functions[name], (functions, name)
        self.kind, self.bytes = type(params), bytes(params)
        self.stream = self.kind.stream.offset // 8
        self.given, self.new = _pointers(params, made, arguments, overlaps)

    def struct(self):
        """(A copy of the parameters, their words)."""
        params = self.kind.from_buffer_copy(self.bytes)
        return params, memoryview(params).cast("B").cast("q")


class _NoPlan(Exception):
    """Of a call that did more than allocate and call native functions."""


def _recipe(tensor, source, arguments, overlaps):
    """(Which argument it is a contiguous copy of, which it is laid out like; None for none; then its layout.)"""
    layout = _layout(tensor)
    copied = None if source is None else _argument_of(source, arguments, overlaps)
    for number, argument in enumerate(arguments):
        if isinstance(argument, _TENSOR) and argument.is_contiguous() and _layout(argument) == layout:
            return copied, number, *layout
    return copied, None, *layout


def _pointers(params, made, arguments, overlaps):
    """Which words of the struct hold addresses in arguments and in allocations: lists of (word, which, bytes from its
    start).

    An address may lie in several arguments, such as slices of one tensor. Then any of them leads to it, as long as they
    lie to each other as now, which overlaps notes.
    """
    given, new = [], []
    for offset in pointer_offsets(type(params)):
        address = ctypes.c_void_p.from_buffer(params, offset).value
        if offset == type(params).stream.offset or not address:
            continue
        found = [
            (places, number, address - tensor.data_ptr())
            for places, tensors in ((given, arguments), (new, made))
            for number, tensor in enumerate(tensors)
            if isinstance(tensor, _TENSOR) and 0 <= address - tensor.data_ptr() < max(1, span(tensor))
        ]
        if not found or (len(found) > 1 and any(places is new for places, _, _ in found)):  # of a copy, for one
            raise _NoPlan
        places, number, distance = found[0]
        overlaps.update((number, other, distance - of_other) for _, other, of_other in found[1:])
        places.append((offset // 8, number, distance))
    return given, new


def span(tensor):
    """Bytes from a tensor's first element to behind its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def pointer_offsets(kind, start=0):
    for name, of in kind._fields_:
        offset = start + getattr(kind, name).offset
        if of is ctypes.c_void_p:
            yield offset
        elif issubclass(of, ctypes.Structure):
            yield from pointer_offsets(of, offset)


def _results_of(results, made):
    """A function from allocations to results in the same form."""
    if isinstance(results, _TENSOR):
        number = _number_of(results, made)
        return lambda made: made[number]
    numbers = [None if result is None else _number_of(result, made) for result in results]
    kind = type(results)
    if kind is list:
        return lambda made: [None if number is None else made[number] for number in numbers]
    new = tuple.__new__
    return lambda made: new(kind, [None if number is None else made[number] for number in numbers])


def _argument_of(tensor, arguments, overlaps):
    """Which of the arguments it is. It may have been given twice, which overlaps then notes."""
    first, *others = _numbers_of(tensor, arguments)
    overlaps.update((first, other, 0) for other in others)
    return first


def _number_of(tensor, tensors):
    """Which of the tensors it is."""
    return _numbers_of(tensor, tensors)[0]


def _numbers_of(tensor, tensors):
    """The same of tensors that may be one. Not by identity: what a dispatch mode sees is another object."""
    what = tensor.data_ptr(), _layout(tensor)
    numbers = [
        number
        for number, other in enumerate(tensors)
        if isinstance(other, _TENSOR) and (other.data_ptr(), _layout(other)) == what
    ]
    if not numbers:
        raise _NoPlan
    return numbers


def _layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


# ---- recording -------------------------------------------------------------------------------------------------------


class Recorder(DispatchMode):
    """Sees what torch does for an implementation, and is told what the native libraries do."""

    def __init__(self):
        super().__init__()
        self.made, self.calls, self.written, self.plain = [], [], [], True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name in _ALLOCATIONS:
            self.made.append((result, None))
        elif name in _COPIES and result.is_contiguous() and not self.calls:  # copies come first in a plan
            if result.data_ptr() != args[0].data_ptr():
                self.made.append((result, args[0]))
        elif name in _VIEWS_IF_POSSIBLE and result.data_ptr() == args[0].data_ptr():
            pass
        elif name not in _VIEWS:
            self.plain = False
        return result


def _record(implementation, arguments):
    """(The implementation's results, the plan or _NEVER)."""
    recorder = Recorder()
    results = run_recorded(recorder, implementation, arguments)
    if not recorder.plain or not recorder.calls:
        return results, _NEVER
    try:
        made = [(tensor, source) for tensor, source in recorder.made if tensor.numel()]  # others have no memory
        return results, Plan(recorder.calls, made, arguments, results, recorder.written)
    except _NoPlan:
        return results, _NEVER


def run_recorded(recorder, function, arguments):
    """function(*arguments), seen by the recorder, of which a thread has one."""
    thread = threading.get_ident()
    _RECORDERS[thread] = recorder
    # Not `with recorder`: that sets variables of the whole process and then puts back what they were, which of two
    # threads may be the other's. Told so that a mode is on for good, some versions of torch.compile give up.
    push_mode(recorder)
    try:
        return function(*arguments)
    finally:
        pop_mode(None)
        del _RECORDERS[thread]


def note_call(functions, name, params, check):
    """For whoever calls native functions: functions[name](params) has just been called. check(functions, name, code)
    raises what an error code stands for.
    """
    if _RECORDERS:
        recorder = _RECORDERS.get(threading.get_ident())
        if recorder is not None:
            copy = type(params).from_buffer_copy(params)  # the caller may go on to change it
            recorder.calls.append((functions, name, copy, check))


def look_at_values():
    """For implementations, of a call that depends on its tensors' values."""
    recorder = _RECORDERS.get(threading.get_ident())
    if recorder is not None:
        recorder.plain = False


def wrote_in_place(tensor):
    """Bumps the version of a tensor that native code has written, so that autograd notices stale saved tensors."""
    if not tensor.is_inference():
        _increment_version(tensor)
    if _RECORDERS:
        recorder = _RECORDERS.get(threading.get_ident())
        if recorder is not None:
            recorder.written.append(tensor)
