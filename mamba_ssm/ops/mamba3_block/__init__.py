"""A Mamba-3 layer between its two projections: a sequence, and a decoding step, its states written in place."""

from mamba_ssm.ops.mamba3_block.block import mamba3_block
from mamba_ssm.ops.mamba3_block.reference import mamba3_block_ref, mamba3_block_step_ref
from mamba_ssm.ops.mamba3_block.step import mamba3_block_step

__all__ = ["mamba3_block", "mamba3_block_ref", "mamba3_block_step", "mamba3_block_step_ref"]
