"""One decoding step of a selective state space model, its state written in place."""

from mamba_ssm.ops.state_update.reference import selective_state_update_ref
from mamba_ssm.ops.state_update.update import selective_state_update

__all__ = ["selective_state_update", "selective_state_update_ref"]
