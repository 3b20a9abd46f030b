"""The Mamba block as one memory-saving autograd node, from its input projection's output on, or from its input on."""

from mamba_ssm.ops.mamba_block import formula as _formula  # noqa: F401  (further derivatives)
from mamba_ssm.ops.mamba_block.block import BlockInputs, mamba_block, mamba_block_part, mamba_node
from mamba_ssm.ops.mamba_block.both import Direction, mamba_inner_both
from mamba_ssm.ops.mamba_block.forward import mamba_inner_fn
from mamba_ssm.ops.mamba_block.projections import project_in
from mamba_ssm.ops.mamba_block.reference import mamba_inner_ref

__all__ = [
    "BlockInputs",
    "Direction",
    "mamba_block",
    "mamba_block_part",
    "mamba_inner_both",
    "mamba_inner_fn",
    "mamba_inner_ref",
    "mamba_node",
    "project_in",
]
