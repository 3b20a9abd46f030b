"""Matrix products over the channels of (B, D, L) tensors, without copies whatever their memory layout, and RMS norm.

A tensor that lies in memory as (D, B, L), as the Mamba block's do, or as (B, L, D), is one matrix of B*L columns, and a
projection is one product. One that lies as (B, D, L) is a batch of matrices.
"""

import torch


def _columns(x):
    """(B, D, L) as a (D, B*L) view, None where its memory layout does not allow that."""
    batch, dim, seqlen = x.shape
    if batch == 1 or x.stride(0) == seqlen * x.stride(2):
        return x.transpose(0, 1).reshape(dim, batch * seqlen)
    return None


def mix_channels(weight, x):
    """weight (O, I) times x (B, I, L) -> (B, O, L)."""
    columns = _columns(x)
    if columns is None:
        return torch.bmm(weight.expand(x.shape[0], -1, -1), x)
    return (weight @ columns).view(weight.shape[0], x.shape[0], x.shape[2]).transpose(0, 1)


def add_mixed_channels(x, weight, y):
    """x + weight (D, O) times y (B, O, L), for x (B, D, L)."""
    x_columns, y_columns = _columns(x), _columns(y)
    if x_columns is None or y_columns is None:
        return torch.baddbmm(x, weight.expand(x.shape[0], -1, -1), y)
    total = torch.addmm(x_columns, weight, y_columns)
    return total.view(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def mix_channels_last(x, weight, bias):
    """x (B, I, L), weight (O, I) -> (B, L, O) contiguous."""
    batch, _, seqlen = x.shape
    columns = _columns(x)
    if columns is not None:
        return torch.nn.functional.linear(columns.t(), weight, bias).view(batch, seqlen, weight.shape[0])
    mixed = weight.t().expand(batch, -1, -1)
    if bias is None:
        return torch.bmm(x.transpose(1, 2), mixed)
    return torch.baddbmm(bias, x.transpose(1, 2), mixed)


def weight_grad(dy, x):
    """Gradient of weight (O, I) in y = mix_channels(weight, x), from dy (B, O, L) and x (B, I, L)."""
    dy_columns, x_columns = _columns(dy), _columns(x)
    if dy_columns is not None and x_columns is not None:
        return dy_columns @ x_columns.t()
    return torch.bmm(dy, x.transpose(1, 2)).sum(0)


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
