"""Whether something sees what runs, so that calls have to take the way that it watches."""

import torch

from mamba_ssm._torch import private
from mamba_ssm._torch.private import is_compiling

# Read on every call, so without the look-up in another module.
_ALL_KNOWN = private.ALL_KNOWN
_dispatch_modes, _transforms_active, _profiling = private.dispatch_modes, private.transforms_active, private.profiling
_tracing_state, _key_included, _PRE_DISPATCH = private.tracing_state, private.key_included, private.PRE_DISPATCH
_forward_ad = private.forward_ad
_TENSOR = torch.Tensor


def watched():
    """Whether something sees operators as they are dispatched: a compiler, a tracer, torch.func, a dispatch mode (fake
    tensors, selective checkpointing), a profiler, forward-mode derivatives; or torch does not say.
    """
    return (
        is_compiling()
        or not _ALL_KNOWN
        or _dispatch_modes() != 0
        or _transforms_active()
        or _profiling()
        or _tracing_state() is not None
        or _key_included(_PRE_DISPATCH)  # make_fx(pre_dispatch=True): its mode is on a stack of its own
        or _forward_ad._current_level >= 0
    )


def functions_watched():
    """Whether something sees torch's functions as they are called, which not even watched operators show: a torch
    function mode; or torch does not say.
    """
    return private.function_modes is None or private.function_modes() != 0


def values_at_hand(tensor):
    """Whether values can be looked at without a synchronisation: a CPU tensor that no tracer or transform has made.

    What torch does not say counts as no: a check of values must not go with a private name, or under a profiler.
    """
    if is_compiling() or not tensor.is_cpu or type(tensor) is not _TENSOR or torch.jit.is_tracing():
        return False
    in_transform = _transforms_active is not None and _transforms_active()
    in_mode = _dispatch_modes is not None and _dispatch_modes() != 0
    return not in_transform and not in_mode
