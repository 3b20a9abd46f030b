"""The layer of a language model in mamba_ssm 1.x."""

from collections.abc import Callable

import torch.nn as nn

from mamba_ssm.modules.block import Block as _Block


class Block(_Block):
    """modules.block.Block without an MLP, with the arguments that it had at this path in mamba_ssm 1.x."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)
