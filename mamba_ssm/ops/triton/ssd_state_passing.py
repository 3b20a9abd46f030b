"""Upstream's import path; the pieces are plain torch, triton is never imported."""

import typing

from mamba_ssm._upstream import AutogradFunction, kernels
from mamba_ssm.ops.ssd.chunk_gradients import passing_backward as _state_passing_bwd
from mamba_ssm.ops.ssd.chunks import state_passing

state_passing_ref = _state_passing_fwd = state_passing

__all__ = ["StatePassingFn", "_state_passing_bwd", "_state_passing_fwd", "state_passing", "state_passing_ref"]


class StatePassingFn(AutogradFunction):
    """state_passing by the name of upstream's autograd.Function."""

    apply = staticmethod(state_passing)
    gradients = 3


if not typing.TYPE_CHECKING:
    _INSTEAD = {f"_state_passing_{way}_kernel": f"_state_passing_{way}" for way in ("fwd", "bwd")}
    __getattr__ = kernels(__name__, _INSTEAD)
