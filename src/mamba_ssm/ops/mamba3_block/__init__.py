"""A Mamba-3 layer between its two projections: a decoding step, its states written in place."""

from mamba_ssm.ops.mamba3_block.reference import mamba3_block_step_ref
from mamba_ssm.ops.mamba3_block.step import mamba3_block_step

__all__ = ["mamba3_block_step", "mamba3_block_step_ref"]
