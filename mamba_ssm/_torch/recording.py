"""Recording what a function does: torch's allocations and computations, and native calls.

A plan (plans.py) makes an operator's or a node's calls again, on new memory each time. record_calls keeps all that a
function allocates, so that its native calls can be repeated on the same memory.
"""

import ctypes
import threading
import typing

import torch

from mamba_ssm._torch.private import MODES_KEEP_INFERENCE, MODES_KNOWN, DispatchMode, pop_mode, push_mode
from mamba_ssm._torch.registry import run_implementation

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# What an implementation may have torch compute: dispatched name -> the function that does it again.
_FUNCTIONS = {
    "_to_copy.default": lambda x, dtype: x.to(dtype, copy=True),
    "addmm.default": torch.addmm,
    "addmm_.default": torch.Tensor.addmm_,
    "clone.default": torch.clone,
    "addmm.dtype_out": torch.addmm,
    "copy_.default": torch.Tensor.copy_,
    "eq.Scalar": torch.eq,
    "exp.default": torch.exp,
    "linear.default": torch.nn.functional.linear,
    "masked_fill.Scalar": torch.masked_fill,
    "matmul.default": torch.matmul,
    "mm.default": torch.mm,
    "mm.dtype": lambda a, b, dtype: torch.mm(a, b, out_dtype=dtype),
    "mm.out": torch.mm,
    "mul.Tensor": torch.mul,
    "neg.default": torch.neg,
    "sum.dim_IntList": torch.sum,
}


def _product_into(x, weight, bias=None, *, out):
    rows, out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    torch.mm(rows, weight, out=out) if bias is None else torch.addmm(bias, rows, weight, out=out)


# The same into memory that there is.
_INTO = {
    _FUNCTIONS["_to_copy.default"]: lambda x, dtype, out: out.copy_(x),
    torch.addmm: torch.addmm,
    torch.clone: lambda x, memory_format=None, *, out: out.copy_(x),
    torch.eq: torch.eq,
    torch.exp: torch.exp,
    torch.nn.functional.linear: lambda x, weight, bias=None, *, out: _product_into(x, weight.t(), bias, out=out),
    torch.masked_fill: lambda x, mask, value, out: out.copy_(x).masked_fill_(mask, value),
    torch.matmul: _product_into,
    torch.mm: torch.mm,
    _FUNCTIONS["mm.dtype"]: lambda a, b, dtype, out: torch.mm(a, b, out_dtype=dtype, out=out),
    torch.mul: torch.mul,
    torch.neg: torch.neg,
    torch.sum: torch.sum,
}


def into_memory(function, operands):
    """The function that does the same into memory that there is, `out`; None if there is none."""
    if function is torch.matmul and operands[1].dim() != 2:
        return None
    return _INTO.get(function)


_VIEWS = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "squeeze",
    "t",
    "transpose",
    "unsqueeze",
    "view",
}
_increment_version = torch.autograd.graph.increment_version
_RECORDERS = {}  # thread -> its recorder, while there is one


class Done(typing.NamedTuple):
    """What torch did: a function of those above, or None for an allocation, its arguments and its result."""

    function: typing.Any
    given: tuple
    named: dict
    result: torch.Tensor


class Recorder(DispatchMode):
    """Sees what torch does for an implementation, in operators inside too, and is told what the native libraries do."""

    def __init__(self):
        super().__init__()
        self.steps = []  # Done, and native calls: (the library's functions, a name in them, the struct, check)
        self.written, self.plain = [], True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "mamba_ssm":
            return self._inside(run_implementation, function, args)
        name = function.__name__
        kind = name.partition(".")[0]
        if kind == "_to_copy" and kwargs.keys() != {"dtype"}:
            self.plain = False  # to another device, say
        elif kind not in _ALLOCATIONS and kind not in _VIEWS and name not in _FUNCTIONS:
            # below autograd and in inference mode contiguous, reshape or linear are not yet what they are made of
            result = self._inside(function.decompose, *args, **kwargs)
            if result is not NotImplemented:
                return result
            self.plain = False
        result = function(*args, **kwargs)
        if kind in _ALLOCATIONS:
            self.steps.append(Done(None, (), {}, result))
        elif name in _FUNCTIONS:
            self.steps.append(Done(_FUNCTIONS[name], args, kwargs, result))
        return result

    def _inside(self, function, *args, **kwargs):
        push_mode(self)
        try:
            return function(*args, **kwargs)
        finally:
            pop_mode(None)


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
            recorder.steps.append((functions, name, copy, check))


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


# ---- calls that are repeated on the same memory ----------------------------------------------------------------------


class Recorded(typing.NamedTuple):
    """calls: (the library's functions, a name in them, the struct, what raises an error code's exception) each.
    made: the tensors that were allocated.
    """

    calls: list
    made: list


def record_calls(function, argument):
    """(function(argument), Recorded), or with None where it did more than allocate, view and make native calls."""
    if not MODES_KNOWN or (torch.is_inference_mode_enabled() and not MODES_KEEP_INFERENCE):
        return function(argument), None
    recorder = Recorder()
    result = run_recorded(recorder, function, (argument,))
    done = [step for step in recorder.steps if type(step) is Done]
    calls = [step for step in recorder.steps if type(step) is not Done]
    if not recorder.plain or not calls or any(step.function is not None for step in done):
        return result, None
    made = [step.result for step in done if step.result.numel()]  # others have no memory
    return result, Recorded(calls, made)


# ---- where memory lies -----------------------------------------------------------------------------------------------


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
