"""Upstream's import path; the code is native, triton is never imported."""

from mamba_ssm.ops.state_update import selective_state_update, selective_state_update_ref

__all__ = ["selective_state_update", "selective_state_update_ref"]
