"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.state_update.reference import selective_state_update_ref
from mamba_ssm.ops.state_update.update import selective_state_update

__all__ = ["selective_state_update", "selective_state_update_ref"]
