"""Plans: what a call did, kept for later calls like it, which then skip checks, layout and filling records.

A small call is bound by the host's time. Most operators only look at their tensors, allocate, and call native functions
with a struct each, or torch for a product. So the second call of a kind is recorded: what it allocated, which functions
of torch it called, and which of a struct's pointers lie in which tensor. Later calls of that kind do the same with
their tensors, writing addresses into copies of the structs. A call that did more has no plan. What a call allocates is
given back after the last step that uses it; what only native functions see is one allocation, in which tensors that are
not needed at the same time share memory.

Calls are of one kind if all that an implementation can see is the same: options, the number of threads, what else the
operator says that it reads, and of each tensor the shape, strides, dtype, device and alignment. An implementation that
looks at values calls `look_at_values`. Plans hold no tensor, and threads share them. They are not used while something
watches operators (see watching.py), so that compilers and tracers never meet one. Whoever changes what native
functions answer calls `forget`.
"""

import contextlib
import ctypes
import math

import torch

from mamba_ssm._torch.private import MODES_KEEP_INFERENCE, below_autograd, current_stream
from mamba_ssm._torch.recording import Done, Recorder, pointer_offsets, run_recorded, span

_MOST = 256  # kinds of calls of one operator: the lengths of texts may all differ
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_NO_TENSORS = {type(None), bool, int, float}
_NEVER = -math.inf  # how often a kind came that has no plan
_PATIENCE = 64  # see Planned.patience
_ALIGNMENT = 16  # the most that kernels read at once
_ROOM = 512  # bytes: allocations begin at a multiple of this, as torch's on CUDA
_empty_strided, _empty_like, _as_strided = torch.empty_strided, torch.empty_like, torch.as_strided
_num_threads = torch.get_num_threads
_increment_version = torch.autograd.graph.increment_version

FORGOTTEN = [0]  # how often forget was called
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
        """The results; None of calls that are not planned. Of a function, not of an operator, a result may be an
        argument or a part of one.
        """
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
            elif kind in _NO_TENSORS or kind is tuple:  # of settings
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


def _record(implementation, arguments):
    """(The implementation's results, the plan or _NEVER)."""
    recorder = Recorder()
    with contextlib.nullcontext() if below_autograd is None else below_autograd():  # where linear is one function
        results = run_recorded(recorder, implementation, arguments)
    if not recorder.plain or all(type(step) is Done for step in recorder.steps):
        return results, _NEVER
    try:
        return results, Plan(recorder.steps, arguments, results, recorder.written)
    except _NoPlan:
        return results, _NEVER


def forgotten():
    """How often plans were dropped: what was recorded before the last time is to be dropped too."""
    return FORGOTTEN[0]


# ---- a plan ----------------------------------------------------------------------------------------------------------


class Plan:
    """What calls of one kind do, with numbered tensors: the arguments, then those that a call makes, in order."""

    def __init__(self, steps, arguments, results, written):
        found = _Tensors(arguments)
        self.steps = [found.step_of(step) for step in steps]
        self.calls = [step for step in self.steps if type(step) is Call]
        # (an argument, another that holds some of the same memory, which the plan counts as the first's, bytes from
        # start to start): the plan is for calls with the same
        self.index = arguments[0].get_device()
        self.results_of = found.results_of(results)
        self.written = [found.number_of(tensor, len(arguments)) for tensor in written]
        self.overlaps = found.overlaps
        self.idle = []  # structs that no call is using: threads share plans
        _give_back(self.steps, len(arguments), set(found.kept))
        _allocate_together(self.steps, arguments[0].device)

    def run(self, arguments, addresses):
        try:
            structs = self.idle.pop()
        except IndexError:
            structs = [call.struct() for call in self.calls]
        tensors, pending = list(arguments), iter(structs)
        stream = None if self.index < 0 else current_stream(self.index)
        for step in self.steps:
            step.run(tensors, addresses, pending, stream)
            for number in step.last:
                tensors[number] = None
        for number in self.written:
            if not arguments[number].is_inference():
                _increment_version(arguments[number])
        self.idle.append(structs)
        return self.results_of(tensors)


def _allocate_together(steps, device):
    """Makes parts of one allocation of those that only native calls use and no result needs. Allocating takes longer
    than most native functions do on the host.
    """
    ends = {number: end for end, step in enumerate(steps) for number in step.last}  # of lifetimes
    for step in steps:
        if type(step) is Function:
            for number in step.numbers:
                ends.pop(number, None)
    parts = []  # (position, number, first byte, behind the last)
    for position, step in enumerate(steps):
        if type(step) is Allocation and step.number in ends and step.bytes and step.device == device:
            parts.append((position, step.number, *_room(parts, position, ends, step.bytes)))
    if len(parts) < 2:
        return
    first, whole, *_ = parts[0]
    size = max(end for *_, end in parts)
    steps[first] = Allocation(whole, None, ((size,), (1,), torch.uint8, device))
    for position, number, begin, _ in parts[1:]:
        steps[position] = Within(number, whole, begin)
    last = max(ends[number] for _, number, *_ in parts)
    for step in steps:
        step.last = tuple(number for number in step.last if number != whole)
    steps[last].last += (whole,)


def _room(parts, position, ends, size):
    """(begin, end) of so many bytes, the lowest that no part holds which is still needed at this position."""
    begin = 0
    for other, end in sorted((begin, end) for _, number, begin, end in parts if ends[number] >= position):
        if other - begin >= size:
            break
        begin = max(begin, -(-end // _ROOM) * _ROOM)
    return begin, begin + size


def _give_back(steps, first, kept):
    """Says of each step which tensors, from the first number that was made on, no later one and no result needs."""
    seen = set(kept)
    for step in reversed(steps):
        step.last = tuple(number for number in step.numbers if number >= first and number not in seen)
        seen.update(step.last)


class Allocation:
    """A step: a new tensor, like another or of this layout."""

    last = ()

    def __init__(self, number, like, layout, size=0):
        self.number, self.numbers = number, {number}
        self.like, self.layout, self.bytes, self.device = like, layout, size, layout[-1]

    def run(self, tensors, addresses, structs, stream):
        if self.like is not None:
            made = _empty_like(tensors[self.like])
        else:
            shape, strides, dtype, device = self.layout
            made = _empty_strided(shape, strides, dtype=dtype, device=device)
        tensors.append(made)
        addresses.append(made.data_ptr())


class Within:
    """A step: a part of an allocation, which no function of torch sees."""

    last = ()

    def __init__(self, number, whole, begin):
        self.number, self.numbers, self.whole, self.begin = number, {number}, whole, begin

    def run(self, tensors, addresses, structs, stream):
        tensors.append(None)
        addresses.append(addresses[self.whole] + self.begin)


class Function:
    """A step: a function of torch, whose result may be a new tensor."""

    def __init__(self, function, operands, named, numbers, is_new):
        self.function, self.operands, self.named = function, operands, named
        self.numbers, self.is_new = numbers, is_new

    def run(self, tensors, addresses, structs, stream):
        given = [operand.of(tensors) for operand in self.operands]
        result = self.function(*given, **{name: operand.of(tensors) for name, operand in self.named})
        if self.is_new:
            tensors.append(result)
            addresses.append(result.data_ptr())


class Call:
    """A step: a native call."""

    def __init__(self, call, pointers):
        functions, name, params, self.check = call
        self.function, self.where = functions[name], (functions, name)
        self.kind, self.bytes = type(params), bytes(params)
        self.stream = self.kind.stream.offset // 8
        self.pointers = pointers  # (word, which tensor's, bytes from its start)
        self.numbers = {number for _, number, _ in pointers}

    def struct(self):
        """(A copy of the parameters, their words)."""
        params = self.kind.from_buffer_copy(self.bytes)
        return params, memoryview(params).cast("B").cast("q")

    def run(self, tensors, addresses, structs, stream):
        params, words = next(structs)
        if stream is not None:
            words[self.stream] = stream
        for word, number, offset in self.pointers:
            words[word] = addresses[number] + offset
        code = self.function(params)
        if code:
            self.check(*self.where, code)


class Constant:
    """What is no tensor, as an operand."""

    def __init__(self, value):
        self.value = value

    def of(self, tensors):
        return self.value


class Whole:
    """A numbered tensor, as an operand or a result."""

    def __init__(self, number):
        self.number = number

    def of(self, tensors):
        return tensors[self.number]


class Part:
    """Some of a numbered tensor's elements, the first of them so many behind its own."""

    def __init__(self, number, shape, strides, distance):
        self.number, self.shape, self.strides, self.distance = number, shape, strides, distance

    def of(self, tensors):
        tensor = tensors[self.number]
        return _as_strided(tensor, self.shape, self.strides, tensor.storage_offset() + self.distance)


class _NoPlan(Exception):
    """Of a call that did more than allocate, compute with torch's functions above, and call native functions."""


class _Tensors:
    """The numbered tensors of a call that is made into a plan."""

    def __init__(self, arguments):
        self.tensors = list(arguments)
        self.arguments = len(arguments)
        self.overlaps = set()  # see Plan
        self.kept = []  # numbers of results

    def step_of(self, step):
        if type(step) is not Done:
            return Call(step, [*self._pointers(step[2])])
        function, operands, named, result = step
        if function is None:
            number = self._add(result)
            return Allocation(number, self._like(result), _layout(result), span(result))
        operands, named = [*map(self._operand, operands)], [(name, self._operand(named[name])) for name in named]
        numbers = {operand.number for operand in (*operands, *(of for _, of in named)) if hasattr(operand, "number")}
        is_new = not any(_holds(tensor, result.data_ptr()) for tensor in self.tensors)
        if is_new:
            numbers.add(self._add(result))
        return Function(function, operands, named, numbers, is_new)

    def results_of(self, results):
        """A function from tensors to results in the same form."""
        if isinstance(results, _TENSOR):
            return self._result(results).of
        kept = [None if result is None else self._result(result) for result in results]
        kind = type(results)
        if kind is list:
            return lambda tensors: [None if result is None else result.of(tensors) for result in kept]
        new = tuple.__new__
        return lambda tensors: new(kind, [None if result is None else result.of(tensors) for result in kept])

    def number_of(self, tensor, end=None):
        """Which of the first so many tensors it is. It may have been given twice, which overlaps then notes."""
        layout = tensor.data_ptr(), _layout(tensor)
        first, *others = [
            number
            for number, other in enumerate(self.tensors[:end])
            if isinstance(other, _TENSOR) and (other.data_ptr(), _layout(other)) == layout
        ] or [None]
        if first is None:
            raise _NoPlan
        self.overlaps.update((first, other, 0) for other in others)
        return first

    def _result(self, tensor):
        result = self._operand(tensor)
        self.kept.append(result.number)
        return result

    def _operand(self, given):
        if not isinstance(given, _TENSOR):
            if isinstance(given, (list, tuple)) and any(isinstance(one, _TENSOR) for one in given):
                raise _NoPlan
            return Constant(given)
        number, distance = self._find(given.data_ptr())
        base = self.tensors[number]
        if given.dtype != base.dtype or given.device != base.device or distance % given.element_size():
            raise _NoPlan
        if distance == 0 and _layout(given) == _layout(base):
            return Whole(number)
        return Part(number, tuple(given.shape), given.stride(), distance // given.element_size())

    def _pointers(self, params):
        """(Which word of the struct, which tensor's address, bytes from its start)."""
        for offset in pointer_offsets(type(params)):
            address = ctypes.c_void_p.from_buffer(params, offset).value
            if offset != type(params).stream.offset and address:
                yield offset // 8, *self._find(address)

    def _find(self, address):
        """(Which tensor an address lies in, bytes from its start).

        It may lie in several arguments, such as slices of one tensor. Then any of them leads to it, as long as they lie
        to each other as now, which overlaps notes.
        """
        found = [
            (number, address - tensor.data_ptr())
            for number, tensor in enumerate(self.tensors)
            if _holds(tensor, address)
        ]
        if not found or (len(found) > 1 and found[-1][0] >= self.arguments):
            raise _NoPlan
        (first, distance), *others = found
        self.overlaps.update((first, other, distance - of_other) for other, of_other in others)
        return first, distance

    def _add(self, tensor):
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _like(self, tensor):
        """A dense argument of the same layout, whose layout need not be spelled out."""
        layout = _layout(tensor)
        for number, argument in enumerate(self.tensors[: self.arguments]):
            if isinstance(argument, _TENSOR) and argument.is_contiguous() and _layout(argument) == layout:
                return number
        return None


def _holds(tensor, address):
    return isinstance(tensor, _TENSOR) and 0 <= address - tensor.data_ptr() < max(1, span(tensor))


def _layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
