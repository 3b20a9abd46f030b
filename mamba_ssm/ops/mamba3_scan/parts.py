"""What Mamba-3's scans in plain torch share: the rotation, the rows of a rank, and what follows the scan.

Letters: B batch, L length, R rank, H heads, P headdim, G groups, N dstate, S angles.
"""

import math

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import convert, working_dtype
from mamba_ssm.ops.mamba3_scan.arguments import Inputs, States


def in_working_dtype(inputs):
    dtype = working_dtype(inputs.V)
    return Inputs(*(convert(tensor, dtype) for tensor in inputs[:-2]), inputs.seq_idx, inputs.cu_seqlens)


def zero_states(inputs):
    """Before a first step."""
    V, (batch, _, rank, _, dstate) = inputs.V, inputs.Q.shape
    heads, headdim = V.shape[2:]
    return States(
        V.new_zeros(batch, heads, inputs.Angles.shape[-1]),
        V.new_zeros(batch, heads, headdim, dstate),
        V.new_zeros(batch, rank, heads, dstate),
        V.new_zeros(batch, heads, headdim),
    )


def per_head(matrix, heads):
    """(B, L, R, G, N) as (B, L, R, H, N)."""
    return matrix.repeat_interleave(heads // matrix.shape[3], dim=3)


def angle_steps(inputs):
    """How far each step turns each angle, (B, L, H, S)."""
    angles = inputs.Angles if inputs.Angles.dim() == 4 else inputs.Angles[:, :, None]
    return math.pi * torch.tanh(angles) * inputs.DT[..., None]


def rotate(x, angle, pairwise):
    """Turns pairs of the last dimension by angle (..., S), entry i of which is for the pair (2i, 2i + 1), or
    (i, i + N/2) where not pairwise. What no angle is for stays.
    """
    count, half = angle.shape[-1], x.shape[-1] // 2
    cos, sin = torch.cos(angle), torch.sin(angle)
    if pairwise:
        a, b = x[..., 0 : 2 * count : 2], x[..., 1 : 2 * count : 2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([turned, x[..., 2 * count :]], dim=-1)
    a, b = x[..., :count], x[..., half : half + count]
    return torch.cat(
        [a * cos - b * sin, x[..., count:half], a * sin + b * cos, x[..., half + count :]],
        dim=-1,
    )


def project(x, weight, rank):
    """x (..., H, P) as rank rows (..., R, H, P), each times its row of weight (H, R, P)."""
    x = x.unsqueeze(-3)
    if weight is None:
        return x.expand(*x.shape[:-3], rank, *x.shape[-2:])
    return x * weight.transpose(0, 1)


def outer(x, k):
    """Sum over the rank of x k^T: (B, R, H, P), (B, R, H, N) -> (B, H, P, N)."""
    return torch.einsum("brhp,brhn->bhpn", x, k)


def finish(y, inputs, options):
    """Norm, gate and output projection of the rows (B, L, R, H, P): (B, L, H, P), or as it is without MIMO_Out."""
    if inputs.norm_weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + options.norm_eps) * inputs.norm_weight
    if inputs.Z is not None:
        y = y * F.silu(project(inputs.Z, inputs.MIMO_Z, y.shape[2]))
    return y if inputs.MIMO_Out is None else (y * inputs.MIMO_Out.transpose(0, 1)).sum(2)
