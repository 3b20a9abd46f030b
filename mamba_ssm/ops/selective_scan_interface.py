"""Upstream's import path for the selective scan and the fused Mamba block, with what forks have added there."""

import torch

from mamba_ssm._upstream import AutogradFunction
from mamba_ssm.ops.mamba_block.composed import bimamba_inner_fn, mamba_inner_fn_no_out_proj
from mamba_ssm.ops.mamba_block.forward import mamba_inner_fn
from mamba_ssm.ops.mamba_block.reference import mamba_inner_ref, rms_norm_ref
from mamba_ssm.ops.norm import layer_norm_fn
from mamba_ssm.ops.selective_scan import selective_scan_fn
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref

__all__ = [
    "MambaInnerFn",
    "SelectiveScanFn",
    "bimamba_inner_fn",
    "mamba_inner_fn",
    "mamba_inner_fn_no_out_proj",
    "mamba_inner_ref",
    "rms_norm_forward",
    "rms_norm_ref",
    "selective_scan_fn",
    "selective_scan_ref",
]


class SelectiveScanFn(AutogradFunction):
    """selective_scan_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(selective_scan_fn)
    gradients = 10


class MambaInnerFn(AutogradFunction):
    """mamba_inner_fn by the name of upstream's autograd.Function."""

    apply = staticmethod(mamba_inner_fn)
    gradients = 20


def rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float = 1e-6, is_rms_norm: bool = True
) -> torch.Tensor:
    """RMSNorm (or LayerNorm) of x (..., N) over its last dimension, without a gradient, as upstream's."""
    with torch.no_grad():
        y = layer_norm_fn(x, weight, bias, eps=eps, is_rms_norm=is_rms_norm)
    assert isinstance(y, torch.Tensor)  # nothing else was asked for
    return y
