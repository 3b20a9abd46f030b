"""Upstream's import path for autograd.Functions under autocast on CUDA, in one spelling for every torch."""

import functools
import typing
from collections.abc import Callable

import torch

__all__ = ["custom_amp_decorator", "custom_bwd", "custom_fwd"]

_Decorator: typing.TypeAlias = Callable[..., typing.Any]


def custom_amp_decorator(dec: _Decorator, cuda_amp_deprecated: bool) -> _Decorator:
    """dec, torch's custom_fwd or custom_bwd, for CUDA: the one of torch.amp (true) has to be told, that of
    torch.cuda.amp (false) does not.
    """
    return functools.partial(dec, device_type="cuda") if cuda_amp_deprecated else dec


_in_amp = hasattr(torch.amp, "custom_fwd")  # torch 2.4
_where: typing.Any = torch.amp if _in_amp else torch.cuda.amp
custom_fwd = custom_amp_decorator(_where.custom_fwd, _in_amp)
custom_bwd = custom_amp_decorator(_where.custom_bwd, _in_amp)
