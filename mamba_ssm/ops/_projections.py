"""Matrix products over the channels of (B, D, L) tensors, and RMS norm over them.

The Mamba block keeps its tensors in memory as (D, B, L): one matrix of B*L columns, so that a projection is one
product and no copy. What comes back from a backward operator lies as (B, D, L) and is taken as a batch of matrices
(batched=True), again without a copy. Both ways are right for either layout. Nothing here looks at strides: old tracers
cannot.
"""

import torch


def to_channel_major(x):
    """(B, D, L) in memory (D, B, L); a copy only if it lies in another way."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _columns(x):
    """(B, D, L) as (D, B*L)."""
    batch, dim, seqlen = x.shape
    return x.transpose(0, 1).reshape(dim, batch * seqlen)


def mix_channels(weight, x, batched=False):
    """weight (O, I) times x (B, I, L) -> (B, O, L)."""
    batch, _, seqlen = x.shape
    if batched and batch != 1:
        return torch.bmm(weight.expand(batch, -1, -1), x)
    return (weight @ _columns(x)).view(weight.shape[0], batch, seqlen).transpose(0, 1)


def add_mixed_channels(x, weight, y):
    """x + weight (D, O) times y (B, O, L), for a contiguous x (B, D, L)."""
    return torch.baddbmm(x, weight.expand(x.shape[0], -1, -1), y)


def mix_channels_last(x, weight, bias):
    """x (B, I, L), weight (O, I) -> (B, L, O) contiguous."""
    batch, _, seqlen = x.shape
    return torch.nn.functional.linear(_columns(x).t(), weight, bias).view(batch, seqlen, weight.shape[0])


def weight_grad(dy, x, batched=False):
    """Gradient of weight (O, I) in y = mix_channels(weight, x), from dy (B, O, L) and x (B, I, L)."""
    if batched and dy.shape[0] != 1:
        return torch.bmm(dy, x.transpose(1, 2)).sum(0).to(dy.dtype)
    return _columns(dy) @ _columns(x).t()


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
