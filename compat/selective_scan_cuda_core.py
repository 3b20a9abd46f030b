"""VMamba's module selective_scan_cuda_core on mamba_ssm's kernels: the scan without gate and autograd, for CUDA and CPU
tensors. nrows, a setting of VMamba's kernels, has no meaning here.
"""

import torch

import _mamba_ssm_finder  # noqa: F401  (before mamba_ssm, which may be a copy)
from mamba_ssm.ops.selective_scan.extension import flexible_backward as bwd
from mamba_ssm.ops.selective_scan.extension import flexible_forward

__all__ = ["bwd", "fwd"]


def fwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    nrows: int = 1,
) -> list[torch.Tensor]:
    """[out, x]; x (B, D, chunks, 2N) float32 is for bwd. delta may have fewer rows than u."""
    return flexible_forward(u, delta, A, B, C, D, delta_bias, delta_softplus, False)
