"""Decoding steps of a selective state space model: its state written in place, or returned anew."""

from mamba_ssm.ops.state_update.reference import selective_state_update_ref
from mamba_ssm.ops.state_update.step import selective_state_step
from mamba_ssm.ops.state_update.update import selective_state_update

__all__ = ["selective_state_step", "selective_state_update", "selective_state_update_ref"]
