"""What autocast is doing, in one spelling for torch 2.2 and later."""

import contextlib

import torch

_PER_DEVICE = hasattr(torch, "get_autocast_dtype")  # torch 2.4


def autocast_dtype(device_type):
    """The dtype that autocast would compute in on this kind of device, None when it is off."""
    if _PER_DEVICE:
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return None


def no_autocast(device_type):
    """Context in which autocast changes nothing."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
