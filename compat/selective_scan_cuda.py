"""Upstream's module selective_scan_cuda on mamba_ssm's kernels: the scan without autograd, for CUDA and CPU tensors.

It is there for copies of mamba_ssm in other projects. Where you can, call mamba_ssm.selective_scan_fn instead.
"""

import torch

import _mamba_ssm_finder  # noqa: F401  (before mamba_ssm, which may be a copy)
from mamba_ssm.ops.selective_scan.extension import backward, forward, gated


def fwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
) -> list[torch.Tensor]:
    """[out, x], with z [out, x, out_z]: out is before the gate, out_z = out * silu(z).

    x (B, D, chunks, 2N) float32 is for bwd; x[:, :, -1, 1::2] is the last state. Arguments as selective_scan_fn's.
    """
    out, x = forward(u, delta, A, B, C, D, delta_bias, delta_softplus)
    return [out, x] if z is None else [out, x, gated(u, delta, A, B, C, D, z, delta_bias, delta_softplus)]


def bwd(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    dout: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None,
    dz: torch.Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[torch.Tensor | None]:
    """[du, ddelta, dA, dB, dC, dD, ddelta_bias], with z also dz, and out_z if it is to be computed again.

    dout: the gradient of out_z, without z of out. dz: a tensor to write z's gradient into, or None for a new one.
    out is not needed.
    """
    with_out_z = bool(recompute_out_z) and z is not None
    grads = backward(u, delta, A, B, C, D, z, delta_bias, dout, x, delta_softplus, with_out_z)
    result = [grads.du, grads.ddelta, grads.dA, grads.dB, grads.dC, grads.dD, grads.ddelta_bias]
    if grads.dz is not None:
        result.append(grads.dz if dz is None else dz.copy_(grads.dz))
    return [*result, grads.out] if with_out_z else result
