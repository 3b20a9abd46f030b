"""LayerNorm and RMSNorm of a residual stream: the sum with the residual and its norm in one pass."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.norm_reference import layer_norm_ref


def layer_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
    return_dropout_mask=False,
):
    """LayerNorm (or RMSNorm) of x + residual over the last dimension.

    Args (float32, float16 or bfloat16 each):
        x: (..., N). residual: like x, added to it; None for none.
        weight: (N). bias: (N), or None.
        x1: like x, added as well. weight1, bias1: (N), a second norm of the same sum.
        dropout_p: x and x1 pass through dropout first.
        rowscale: x's shape without N, x is multiplied by it; not with x1.
        prenorm: also return the sum, the next layer's residual.
        residual_in_fp32: without a residual, the sum is returned in float32 instead of x's dtype.
        is_rms_norm: RMSNorm instead of LayerNorm.
        return_dropout_mask: also return which elements of x and of x1 dropout has kept.

    Returns:
        y of x's shape and dtype. Or a tuple of y; with weight1 the second norm; with prenorm the sum, of residual's
        dtype, as it was normalised: rounded to that dtype; with return_dropout_mask two masks or None.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, device or combination is wrong.

    Same as upstream's mamba_ssm.ops.triton.layer_norm.layer_norm_fn.
    """
    mask = mask1 = None
    if x1 is not None or rowscale is not None or dropout_p > 0.0:
        x, residual, mask, mask1 = _mix(x, residual, x1, dropout_p, rowscale, residual_in_fp32)
    y, total = _add_norm(x, residual, weight, bias, eps, prenorm or weight1 is not None, residual_in_fp32, is_rms_norm)
    outputs = [y]
    if weight1 is not None:
        y1, _ = _add_norm(total, None, weight1, bias1, eps, False, False, is_rms_norm)
        outputs.append(y1.to(x.dtype))
    if prenorm:
        outputs.append(total)
    if return_dropout_mask:
        outputs += [mask, mask1]
    return tuple(outputs) if len(outputs) > 1 else y


def rms_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """layer_norm_fn with is_rms_norm=True: x / rms(x) * weight + bias.

    Same as upstream's mamba_ssm.ops.triton.layer_norm.rms_norm_fn.
    """
    options = eps, dropout_p, rowscale, prenorm, residual_in_fp32, True, return_dropout_mask
    return layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, *options)


def layer_norm_linear_fn(
    x,
    norm_weight,
    norm_bias,
    linear_weight,
    linear_bias,
    residual=None,
    eps=1e-6,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
):
    """A linear layer on layer_norm_fn's result: F.linear(norm(x + residual), linear_weight, linear_bias).

    Args:
        linear_weight: (out features, N), linear_bias: (out features) or None. The others: see layer_norm_fn.

    Returns:
        (..., out features) of linear_weight's dtype, under autocast of its dtype; with prenorm also the sum.

    Same as upstream's mamba_ssm.ops.triton.layer_norm.layer_norm_linear_fn, which computes the norm again in backward;
    here it is kept.
    """
    y, total = _add_norm(x, residual, norm_weight, norm_bias, eps, prenorm, residual_in_fp32, is_rms_norm)
    out = F.linear(y.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, total) if prenorm else out


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, hidden_size elements, of x + residual: see layer_norm_fn.

    Parameter: weight (hidden_size); there is no bias. dropout_p applies to x in training.
    """

    def __init__(self, hidden_size, eps=1e-5, dropout_p=0.0, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.dropout_p = dropout_p
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.dropout_p if self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


def _mix(x, residual, x1, dropout_p, rowscale, residual_in_fp32):
    """x after rowscale and dropout, and the residual with x1 in it; the dropout masks. Rare, so in plain torch."""
    mask = mask1 = None
    if rowscale is not None:
        if x1 is not None:
            raise ValueError("layer_norm: rowscale and x1 cannot be given together")
        if rowscale.shape != x.shape[:-1]:
            raise ValueError(
                f"layer_norm: rowscale must have x's shape without the last dimension = {tuple(x.shape[:-1])}, "
                f"got {tuple(rowscale.shape)}"
            )
        x = (x * rowscale[..., None]).to(x.dtype)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"layer_norm: dropout_p must be at least 0 and less than 1, got {dropout_p}")
    if dropout_p > 0.0:
        x, mask = torch.native_dropout(x, dropout_p, True)
    if x1 is not None:
        if x1.shape != x.shape:
            raise ValueError(f"layer_norm: x1 must have x's shape {tuple(x.shape)}, got {tuple(x1.shape)}")
        if dropout_p > 0.0:
            x1, mask1 = torch.native_dropout(x1, dropout_p, True)
        if residual is None:
            residual = x1.to(torch.float32 if residual_in_fp32 else x.dtype)
        else:
            residual = (residual + x1).to(residual.dtype)
    return x, residual, mask, mask1


def _add_norm(x, residual, weight, bias, eps, want_sum, residual_in_fp32, is_rms_norm):
    """norm(x + residual), and the sum if it is wanted."""
    if residual is None and residual_in_fp32:
        residual = torch.zeros_like(x, dtype=torch.float32)
    result = layer_norm_ref(x, weight, bias, residual, eps=eps, prenorm=True, is_rms_norm=is_rms_norm)
    return result if want_sum else (result[0], None)
