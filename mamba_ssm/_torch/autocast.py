"""What autocast is doing, in one spelling for torch 2.2 and later."""

import contextlib

import torch

from mamba_ssm._torch.private import SINCE_2_4, is_compiling, is_traced


def traced_by_old_torch():
    """Whether torch 2.2 or 2.3 is compiling, whose tracer reads no autocast state and few autograd.Functions."""
    return not SINCE_2_4 and is_compiling()


def autocast_dtype(tensor):
    """The dtype that autocast would compute in on this tensor's device, None when it is off."""
    device_type = tensor.device.type
    if device_type == "meta":  # which torch refuses to be asked about
        return None
    if SINCE_2_4:
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if traced_by_old_torch():
        return tensor.dtype  # the projection that made it was cast already
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return None


def autocast_state():
    """What else torch's products depend on than their operands."""
    if not SINCE_2_4:
        on, on_cpu = torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled()
        return on and torch.get_autocast_gpu_dtype(), on_cpu and torch.get_autocast_cpu_dtype()
    on, on_cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return on and torch.get_autocast_dtype("cuda"), on_cpu and torch.get_autocast_dtype("cpu")


def no_autocast(tensor):
    """Context in which autocast changes nothing. Compilers trace backward under forward's autocast: nothing to do."""
    if is_traced() or autocast_dtype(tensor) is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def autocast_without_cache(tensor):
    """Context in which autocast, if it is on, casts at each use. A CUDA graph that had been captured with copies of
    weights from autocast's cache would read their memory after autocast has given it back.
    """
    dtype = autocast_dtype(tensor)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, dtype=dtype, cache_enabled=False)
