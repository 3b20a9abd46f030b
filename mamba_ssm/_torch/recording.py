"""What native calls a function of several operators makes, for those who make them again.

A plan repeats one operator's calls, on new memory each time. Here all that a function allocates is kept, so that its
calls can be repeated on the same memory.
"""

import typing

import torch

from mamba_ssm._torch import plans
from mamba_ssm._torch.private import MODES_KEEP_INFERENCE, MODES_KNOWN

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
    recorder = plans.Recorder()
    result = plans.run_recorded(recorder, function, (argument,))
    done = [step for step in recorder.steps if type(step) is plans.Done]
    calls = [step for step in recorder.steps if type(step) is not plans.Done]
    if not recorder.plain or not calls or any(step.function is not None for step in done):
        return result, None
    made = [step.result for step in done if step.result.numel()]  # others have no memory
    return result, Recorded(calls, made)


def plans_forgotten():
    """How often plans were dropped: what was recorded before the last time is to be dropped too."""
    return plans.FORGOTTEN[0]
