"""The steps of a plan (plans.py): allocations, functions of torch and native calls, on numbered tensors.

A call's arguments have the first numbers, then what it makes, in order. Beside the list of tensors there is one of
their addresses, which is all that native calls need.
"""

import ctypes
from functools import partial

import torch

from mamba_ssm._torch.recording import Done, into_memory, pointer_offsets, span

_TENSOR = torch.Tensor
_as_strided = torch.as_strided


class Allocation:
    """A step: a new tensor of this layout."""

    last = ()

    def __init__(self, number, layout, size=0):
        self.number, self.numbers = number, {number}
        self.layout, self.bytes, self.device = layout, size, layout[-1]
        self.make = allocation(*layout)

    def run(self, tensors, addresses, structs, stream):
        made = self.make()
        tensors.append(made)
        addresses.append(made.data_ptr())


def allocation(shape, strides, dtype, device):
    """A function that allocates. Not torch.empty_strided, which reads dtype and device in each call: on CUDA it takes
    3.9 us where torch.empty_like takes 1.9.
    """
    return partial(torch.empty(0, dtype=dtype, device=device).new_empty_strided, shape, strides)


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

    def __init__(self, function, operands, named, numbers, made=None, function_into=None):
        self.function, self.operands, self.named, self.numbers = function, operands, named, numbers
        self.made = made  # the Allocation that it does by itself, if it does
        self._into = function_into
        out = dict(named).get("out", operands[0])
        # Which tensor it writes, if it makes none. The function raises its version, a graph does not, so plans do.
        self.wrote = getattr(out, "number", None) if made is None else None

    def run(self, tensors, addresses, structs, stream):
        given = [operand.of(tensors) for operand in self.operands]
        result = self.function(*given, **{name: operand.of(tensors) for name, operand in self.named})
        if self.made is not None:
            tensors.append(result)
            addresses.append(result.data_ptr())

    def into(self):
        """The same step where memory for its result is there; None if there is no such function."""
        if self.made is None:
            return self
        if self._into is None:
            return None
        return Function(self._into, self.operands, [*self.named, ("out", Whole(self.made.number))], self.numbers)


class Call:
    """A step: a native call."""

    def __init__(self, call, pointers):
        functions, name, params, self.check = call
        self.function, self.where = functions[name], (functions, name)
        self.kind, self.bytes = type(params), bytes(params)
        self.stream = self.kind.stream.offset // 8
        self.pointers = pointers  # (word, which tensor's, bytes from its start)
        self.numbers = {number for _, number, _ in pointers}

    def into(self):
        """As of a function: it makes nothing."""
        return self

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


class NoPlan(Exception):
    """Of a call that did more than allocate, compute with torch's functions above, and call native functions."""


class Tensors:
    """The numbered tensors of a call that is made into a plan."""

    def __init__(self, arguments):
        self.tensors = []
        self.places = []  # (a tensor's number, its first byte, behind the last that it may have)
        for argument in arguments:
            self._add(argument)
        self.arguments = len(arguments)
        self.overlaps = set()  # see Plan
        self.kept = []  # numbers of results

    def step_of(self, step):
        if type(step) is not Done:
            return Call(step, [*self._pointers(step[2])])
        function, operands, named, result = step
        into = into_memory(function, operands)
        if function is None:
            number = self._add(result)
            return Allocation(number, layout_of(result), span(result))
        operands, named = [*map(self._operand, operands)], [(name, self._operand(named[name])) for name in named]
        numbers = {operand.number for operand in (*operands, *(of for _, of in named)) if hasattr(operand, "number")}
        made = None
        address = result.data_ptr()
        if not any(begin <= address < end for _, begin, end in self.places):
            made = Allocation(self._add(result), layout_of(result), span(result))
            numbers.add(made.number)
        return Function(function, operands, named, numbers, made, into)

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

    def has_made(self, tensor):
        """Whether it is memory of the call's own."""
        return self._find(tensor.data_ptr())[0] >= self.arguments

    def argument_of(self, tensor):
        """Which argument it is. It may have been given twice, which overlaps then notes."""
        layout = tensor.data_ptr(), layout_of(tensor)
        first, *others = [
            number
            for number, other in enumerate(self.tensors[: self.arguments])
            if isinstance(other, _TENSOR) and (other.data_ptr(), layout_of(other)) == layout
        ] or [None]
        if first is None:
            raise NoPlan
        self.overlaps.update((first, other, 0) for other in others)
        return first

    def _result(self, tensor):
        result = self._operand(tensor)
        self.kept.append(result.number)
        return result

    def _operand(self, given):
        if not isinstance(given, _TENSOR):
            if isinstance(given, (list, tuple)) and any(isinstance(one, _TENSOR) for one in given):
                raise NoPlan
            return Constant(given)
        number, distance = self._find(given.data_ptr())
        base = self.tensors[number]
        if given.dtype != base.dtype or given.device != base.device or distance % given.element_size():
            raise NoPlan
        if distance == 0 and layout_of(given) == layout_of(base):
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
        found = [(number, address - begin) for number, begin, end in self.places if begin <= address < end]
        if not found or (len(found) > 1 and found[-1][0] >= self.arguments):
            raise NoPlan
        (first, distance), *others = found
        self.overlaps.update((first, other, distance - of_other) for other, of_other in others)
        return first, distance

    def _add(self, given):
        number = len(self.tensors)
        self.tensors.append(given)
        if isinstance(given, _TENSOR):
            begin = given.data_ptr()
            self.places.append((number, begin, begin + max(1, span(given))))
        return number


def layout_of(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
