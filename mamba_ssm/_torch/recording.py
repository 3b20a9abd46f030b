"""What native calls a function of several operators makes, for those who make them again.

A plan repeats one operator's calls, on new memory each time. Here all that a function allocates is kept, so that its
calls can be repeated on the same memory.
"""

import typing

import torch

from mamba_ssm._torch import plans
from mamba_ssm._torch.private import MODES_KEEP_INFERENCE, MODES_KNOWN, pop_mode, push_mode
from mamba_ssm._torch.registration import run_implementation

pointer_offsets, span = plans.pointer_offsets, plans.span


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
    recorder = _Recorder()
    result = plans.run_recorded(recorder, function, (argument,))
    copies = any(source is not None for _, source in recorder.made)
    if copies or not recorder.plain or not recorder.calls:
        return result, None
    made = [tensor for tensor, _ in recorder.made if tensor.numel()]  # others have no memory
    return result, Recorded(recorder.calls, made)


def plans_forgotten():
    """How often plans were dropped: what was recorded before the last time is to be dropped too."""
    return plans.FORGOTTEN[0]


class _Recorder(plans.Recorder):
    """Sees what operators do inside, too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "mamba_ssm":
            return super().__torch_dispatch__(function, types, args, kwargs)
        push_mode(self)
        try:
            return run_implementation(function, args)
        finally:
            pop_mode(None)
