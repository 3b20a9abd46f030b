"""One decoding step of a Mamba layer between its two outer projections, its states written in place."""

from mamba_ssm.ops.mamba_step.reference import mamba_step_ref
from mamba_ssm.ops.mamba_step.step import mamba_step

__all__ = ["mamba_step", "mamba_step_ref"]
