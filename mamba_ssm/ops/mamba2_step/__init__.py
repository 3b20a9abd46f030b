"""One decoding step of a Mamba-2 layer between its two projections, its states written in place."""

from mamba_ssm.ops.mamba2_step.reference import mamba2_step_ref
from mamba_ssm.ops.mamba2_step.step import mamba2_step

__all__ = ["mamba2_step", "mamba2_step_ref"]
