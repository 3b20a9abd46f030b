"""The Mamba-2 block as one memory-saving autograd node, from its input projection's output on, or from its input on."""

from mamba_ssm.ops.mamba2_block import formula as _formula  # noqa: F401  (further derivatives)
from mamba_ssm.ops.mamba2_block.arguments import Options
from mamba_ssm.ops.mamba2_block.block import BlockInputs, mamba2_block, mamba2_node
from mamba_ssm.ops.mamba2_block.forward import mamba_split_conv1d_scan_combined
from mamba_ssm.ops.mamba2_block.reference import mamba_conv1d_scan_ref, mamba_split_conv1d_scan_ref

__all__ = [
    "BlockInputs",
    "Options",
    "mamba2_block",
    "mamba2_node",
    "mamba_conv1d_scan_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
]
