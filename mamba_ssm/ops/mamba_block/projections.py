"""Matrix layout of (B, D, L) tensors, and RMS norm over their channels.

The Mamba block keeps its tensors in memory as (D, B, L): one matrix of B*L columns, so that a projection is one
product and no copy. Nothing here looks at strides: old tracers cannot.
"""

import torch


def to_channel_major(x):
    """(B, D, L) in memory (D, B, L); a copy only if it lies in another way."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def to_columns(x):
    """(B, D, L) as the matrix (D, B*L); a view if it lies in memory as (D, B, L)."""
    batch, dim, seqlen = x.shape
    return x.transpose(0, 1).reshape(dim, batch * seqlen)


def from_columns(matrix, batch, seqlen):
    """The matrix (D, B*L) as a view (B, D, L)."""
    return matrix.view(matrix.shape[0], batch, seqlen).transpose(0, 1)


def project_in(hidden_states, weight, bias):
    """A linear layer of hidden_states (B, L, d_model) as (B, D, L), in memory (D, B, L)."""
    batch, seqlen, d_model = hidden_states.shape
    projected = torch.mm(weight, hidden_states.reshape(batch * seqlen, d_model).t())
    if bias is not None:
        projected = projected + bias.to(projected.dtype)[:, None]
    return from_columns(projected, batch, seqlen)


def rms_norm_channels(x, weight, eps):
    """x (B, D, L) / its root mean square over D, times weight (D)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * weight.float()[:, None]).to(x.dtype)


def rms_norm_channels_grad(dy, x, weight, eps):
    """Gradients of x and weight in y = rms_norm_channels(x, weight, eps)."""
    dy_wide, wide = dy.float(), x.float()
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    normed = wide * scale
    dnormed = dy_wide * weight.float()[:, None]
    dx = scale * (dnormed - normed * (dnormed * normed).mean(1, keepdim=True))
    return dx.to(x.dtype), (dy_wide * normed).sum((0, 2)).to(weight.dtype)
