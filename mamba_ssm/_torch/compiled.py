"""Functions by plans (plans.py) as operators of compiled programs.

A compiler finds little to fuse in layers that are kernels of ours and products. Left as operators they are some hundred
calls of Python in a pass of a small model. As one operator for forward and one for backward they take what plans take,
and there is less to compile.

A function may return an argument, a view of one, or a tensor twice; an operator may not. So when a program is traced,
a function is called once on fake tensors, which shows what its operator returns and where the other results are.
"""

import contextlib
import functools
import json
import typing

import torch

from mamba_ssm._torch import private
from mamba_ssm._torch.autocast import autocast_dtype
from mamba_ssm._torch.dispatch import FUNCTIONS_BY_PLANS
from mamba_ssm._torch.registration import define_without_autograd
from mamba_ssm.version import __version__

_STEPS = 8  # of the fake sequences


class AsOperator(typing.NamedTuple):
    """What a traced program knows of a function's call."""

    settings: str  # all that is no tensor, for the operator
    # of each result None, or a number among what the operator returns, or (which argument,), or (which argument, the
    # shape in which it is viewed)
    results: tuple[typing.Any, ...]


def run_operator(name: str, tensors: list[typing.Any], of_call: typing.Any) -> list[typing.Any]:
    """The function's results. of_call: an AsOperator's fields."""
    settings, places = of_call
    returned = _operator(name, tensors, settings)
    found = []
    for place in places:
        if place is None or isinstance(place, int):
            found.append(None if place is None else returned[place])
        else:
            found.append(tensors[place[0]] if len(place) == 1 else tensors[place[0]].view(place[1]))
    return found


def both_ways(name, device, layouts, arguments, outputs):
    """(AsOperator, AsOperator), as plain tuples, of the function of this name and of its backward, name + "_backward".

    layouts: of each of the function's tensors (shape, dtype), or None; sizes of batch and length, which do not matter
    here, are None. arguments: of both functions, behind the tensors. Of what the function returns the first `outputs`
    have gradients, which its backward takes; the others are kept, and follow them.
    """
    with private.FakeTensorMode():
        tensors = [None if layout is None else _fake(*layout, device) for layout in layouts]
        parameters = [number for number, layout in enumerate(layouts) if layout is not None and None not in layout[0]]
        forward, results = _as_operator(name, tensors, arguments, parameters)
        grads = [torch.empty_like(output) for output in results[:outputs]]
        with _autocast(grads[0], None):
            backward, _ = _as_operator(f"{name}_backward", [*grads, *results[outputs:]], arguments, ())
    return tuple(forward), tuple(backward)


# A compiler calls it while it traces its caller, and keeps the result: what torch.compiler.assume_constant_result does,
# which imports all of the compiler.
both_ways._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any attribute


def _fake(shape, dtype, device):
    sizes = [_STEPS if size is None else size for size in shape]
    return torch.empty(sizes, dtype=dtype, device=device)


def _as_operator(name, tensors, arguments, parameters):
    """(The AsOperator, the results). parameters: the numbers of tensors whose shapes are those of all calls."""
    results = [*FUNCTIONS_BY_PLANS[name](*tensors, *arguments)]
    returned, copied, places = [], [], []  # the first two: numbers of results
    for number, result in enumerate(results):
        before = [results[other] for other in returned]
        place = _place(result, tensors, before, parameters)
        if place == len(returned):
            if any(_share_memory(result, other) for other in (*tensors, *before)):
                copied.append(number)
            returned.append(number)
        places.append(place)
    autocast = autocast_dtype(tensors[0])
    settings = json.dumps([__version__, arguments, autocast, returned, copied], default=_name_of_dtype)
    return AsOperator(settings, tuple(places)), results


def _name_of_dtype(value):
    if not isinstance(value, torch.dtype):
        raise TypeError(f"a setting of a compiled layer must be a number, a bool or None, got {type(value).__name__}")
    return str(value)


def _place(result, tensors, returned, parameters):
    """Where a result is, as AsOperator has it; len(returned): nowhere yet."""
    if result is None:
        return None
    for number, other in enumerate(returned):
        if result is other:
            return number
    for number, tensor in enumerate(tensors):
        if result is tensor:
            return (number,)
        if number in parameters and _share_memory(result, tensor) and _is_all_of(result, tensor):
            return number, tuple(result.shape)
    return len(returned)


def _is_all_of(view, tensor):
    return view.numel() == tensor.numel() and view.is_contiguous() and tensor.is_contiguous()


def _share_memory(one, other):
    return other is not None and private.storage_of(one) == private.storage_of(other)


# ---- the operator ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _decoded(settings):
    _, arguments, autocast, returned, copied = json.loads(settings)  # the version: for caches of compiled programs
    return _as_given(arguments), _as_given(autocast), returned, copied


def _as_given(value):
    """What json has made lists and strings of."""
    if isinstance(value, list):
        return tuple(map(_as_given, value))
    is_dtype = isinstance(value, str) and value.startswith("torch.")
    return getattr(torch, value.removeprefix("torch.")) if is_dtype else value


def _run(name, tensors, settings):
    arguments, autocast, returned, copied = _decoded(settings)
    with _autocast(tensors[0], autocast):
        results = FUNCTIONS_BY_PLANS[name](*tensors, *arguments)
    return [results[number].clone() if number in copied else results[number] for number in returned]


def _autocast(like, dtype):
    """As it was where the call was traced: compiled programs run without."""
    if autocast_dtype(like) == dtype:
        return contextlib.nullcontext()
    return torch.autocast(like.device.type, dtype=dtype, enabled=dtype is not None)


_operator = define_without_autograd(
    "planned_function(str name, Tensor?[] tensors, str settings) -> Tensor[]", _run, _run
)
