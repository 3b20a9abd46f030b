"""Several native calls by one, on the memory that they had when they were recorded: the CPU's CUDA graph."""

import bisect
import ctypes
import typing
from collections.abc import Callable, Iterable

import torch

from mamba_ssm._native import abi
from mamba_ssm._torch import Recorded, plans_forgotten, pointer_offsets, record_calls, span

ALIGNMENT = 64  # of a tensor that torch allocates on the CPU
# a struct, which of its words holds an address, and how many bytes behind the tensor's start that is
_Words: typing.TypeAlias = "tuple[memoryview, int, int]"


class _NoSequenceError(Exception):
    """Of calls that use memory which is not known to stay."""


def record(
    function: Callable[[torch.Tensor], torch.Tensor], argument: torch.Tensor, known: Iterable[torch.Tensor]
) -> "tuple[torch.Tensor, Sequence | None]":
    """(function(argument), what repeats it for other arguments of the same layout; None where that is not possible).

    It is where the function makes native calls on CPU tensors and nothing else, which use what it allocates, argument,
    and known: tensors such as parameters and states. Whether these are where they were, and whether the function would
    still do the same, only the caller can tell, who also calls wrote_in_place for those that are written.
    """
    result, recorded = record_calls(function, argument)
    if recorded is None:
        return result, None
    try:
        return result, Sequence(recorded, argument, result, known)
    except _NoSequenceError:
        return result, None


class Sequence:
    """For one thread at a time, since all runs use the same memory."""

    def __init__(
        self, recorded: Recorded, argument: torch.Tensor, result: torch.Tensor, known: Iterable[torch.Tensor]
    ) -> None:
        out = next((tensor for tensor in recorded.made if tensor.data_ptr() == result.data_ptr()), None)
        whole = out is not None and out.numel() == result.numel() and out.is_contiguous() and result.is_contiguous()
        if out is None or not whole or argument.data_ptr() % ALIGNMENT:
            raise _NoSequenceError
        self._kept = [tensor for tensor in recorded.made if tensor is not out]
        known = [tensor.detach() for tensor in known]
        self._known = known  # another thread may give a parameter other memory in the midst of a run
        self._argument = argument.shape, argument.stride(), argument.dtype
        self._result = result.shape, result.dtype
        self._forgotten = plans_forgotten()
        self._functions, _, _, self._check = recorded.calls[0]
        self._structs = [params for _, _, params, _ in recorded.calls]
        self._from_argument: list[_Words] = []
        self._to_result: list[_Words] = []
        self._find_addresses(_Memory([*self._kept, *known]), argument, out)
        self._calls = (abi.MambaCall * len(recorded.calls))()
        for call, (functions, name, params, _) in zip(self._calls, recorded.calls, strict=True):
            call.function = _address_of(functions[name])
            call.params = ctypes.addressof(params)
        self._params = abi.MambaSequence(len(recorded.calls), ctypes.addressof(self._calls))

    def _find_addresses(self, memory: "_Memory", argument: torch.Tensor, out: torch.Tensor) -> None:
        """Notes which of the structs' addresses are of the argument and the result; the rest stay what they are."""
        for params in self._structs:
            words = memoryview(params).cast("B").cast("q")
            for offset in pointer_offsets(type(params)):
                address = words[offset // 8]
                if not address or offset == type(params).stream.offset:
                    continue
                for tensor, places in ((argument, self._from_argument), (out, self._to_result)):
                    if 0 <= address - tensor.data_ptr() < span(tensor):
                        places.append((words, offset // 8, address - tensor.data_ptr()))
                        break
                else:
                    if address not in memory:
                        raise _NoSequenceError

    def takes(self, argument: torch.Tensor) -> bool:
        """Whether it may be run on this tensor."""
        return (
            (argument.shape, argument.stride(), argument.dtype) == self._argument
            and argument.data_ptr() % ALIGNMENT == 0
            and plans_forgotten() == self._forgotten
        )

    def run(self, argument: torch.Tensor) -> torch.Tensor:
        """The function's result. Raises what the first call that fails raises; the rest is not called then."""
        shape, dtype = self._result
        result = torch.empty(shape, dtype=dtype, device="cpu")
        for tensor, places in ((argument, self._from_argument), (result, self._to_result)):
            start = tensor.data_ptr()
            for words, word, offset in places:
                words[word] = start + offset
        code = self._functions["run_sequence"](self._params)
        if code:
            self._check(self._functions, "run_sequence", code)
        return result


class _Memory:
    """Which addresses lie in some tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted((tensor.data_ptr(), tensor.data_ptr() + span(tensor)) for tensor in tensors):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __contains__(self, address: int) -> bool:
        place = bisect.bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]


def _address_of(function: Callable[..., typing.Any]) -> int:
    """Of a native function; a test may have put one of Python's in its place."""
    try:
        return typing.cast(int, ctypes.cast(typing.cast(typing.Any, function), ctypes.c_void_p).value)
    except ctypes.ArgumentError:
        raise _NoSequenceError from None
