"""Upstream's import path; the pieces are plain torch, triton is never imported."""

from mamba_ssm.ops.ssd.chunks import state_passing

state_passing_ref = _state_passing_fwd = state_passing

__all__ = ["_state_passing_fwd", "state_passing", "state_passing_ref"]
