"""LayerNorm and RMSNorm of a residual stream: the sum with the residual and its norm in one pass."""

import torch
import torch.nn.functional as F

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import autocast_dtype, call, call_below_autograd, call_in_backward, define
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.norm import arguments as common

_NAME = "layer_norm"


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
    dropout_p = checks.check_number(_NAME, "dropout_p", dropout_p)
    if x1 is not None or rowscale is not None or dropout_p != 0.0:
        x, residual, mask, mask1 = _mix(x, residual, x1, dropout_p, rowscale, residual_in_fp32)
    y, total = _add_norm(x, residual, weight, bias, eps, prenorm or weight1 is not None, residual_in_fp32, is_rms_norm)
    outputs = [y]
    if weight1 is not None:
        common.check_named_parameters(_NAME, x, weight1, bias1, "weight1", "bias1")
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
    _check_linear(x, norm_weight, norm_bias, linear_weight, linear_bias)
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


def _check_linear(x, norm_weight, norm_bias, linear_weight, linear_bias):
    name = "layer_norm_linear_fn"
    checks.check_tensor(name, "x", x)
    common.check_rows(name, "x", x)
    common.check_named_parameters(name, x, norm_weight, norm_bias, "norm_weight", "norm_bias")
    checks.check_tensor(name, "linear_weight", linear_weight)
    checks.check_dims(name, "linear_weight", linear_weight, 2, "(out features, N)")
    features = linear_weight.shape[0]
    shape = features, x.shape[-1]
    checks.check_float(name, "linear_weight", linear_weight, shape, x, "x", "(out features, N)")
    if linear_bias is not None:
        checks.check_tensor(name, "linear_bias", linear_bias)
        checks.check_float(name, "linear_bias", linear_bias, (features,), x, "x", "(out features,)")
        if linear_bias.dtype != linear_weight.dtype and autocast_dtype(x) is None:
            checks.check_same(name, "linear_bias", linear_bias, (features,), linear_weight, "linear_weight", "")


def _mix(x, residual, x1, dropout_p, rowscale, residual_in_fp32):
    """x after rowscale and dropout, and the residual with x1 in it; the dropout masks. Rare, so in plain torch."""
    checks.check_tensor(_NAME, "x", x)
    common.check_rows(_NAME, "x", x)
    for name, tensor, shape, letters in (
        ("residual", residual, x.shape, "(..., N)"),
        ("x1", x1, x.shape, "(..., N)"),
        ("rowscale", rowscale, x.shape[:-1], "(...) of x (..., N)"),
    ):
        if tensor is not None:
            checks.check_tensor(_NAME, name, tensor)
            checks.check_float(_NAME, name, tensor, shape, x, "x", letters)
    mask = mask1 = None
    if rowscale is not None:
        if x1 is not None:
            raise ValueError(f"{_NAME}: rowscale and x1 cannot be given together")
        x = (x * rowscale[..., None]).to(x.dtype)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{_NAME}: dropout_p must be at least 0 and less than 1, got {dropout_p}")
    if dropout_p > 0.0:
        x, mask = torch.native_dropout(x, dropout_p, True)
    if x1 is not None:
        if dropout_p > 0.0:
            x1, mask1 = torch.native_dropout(x1, dropout_p, True)
        if residual is None:
            residual = x1.to(torch.float32 if residual_in_fp32 else x.dtype)
        else:
            residual = (residual + x1).to(residual.dtype)
    return x, residual, mask, mask1


def _add_norm(x, residual, weight, bias, eps, want_sum, sum_in_fp32, is_rms_norm):
    """norm(x + residual), and the sum if it is wanted."""
    beside = residual
    if residual is not None:
        checks.check_tensor(_NAME, "x", x)
        checks.check_tensor(_NAME, "residual", residual)
        if residual.dtype != x.dtype:
            beside = checks.widen(residual)  # the kernels take float32 beside any x
    eps = checks.check_number(_NAME, "eps", eps)
    flags = bool(want_sum), bool(sum_in_fp32), bool(is_rms_norm), False
    out, total, _, _ = call(add_norm_op, x, beside, weight, bias, eps, *flags)
    if not want_sum:
        return out, None
    if total is None:
        return out, x
    return out, total if residual is None else total.to(residual.dtype)


# ---- forward operator ------------------------------------------------------------------------------------------------


def _check_forward(x, residual, weight, bias):
    common.check_rows(_NAME, "x", x)
    common.check_parameters(_NAME, x, weight, bias)
    if residual is not None:
        common.check_beside(_NAME, "residual", residual, x)


def _allocate(x, residual, want_sum, sum_in_fp32, is_rms_norm, want_statistics):
    """out, the sum (None where it is not wanted, or x itself), mean and rstd."""
    total = None
    if want_sum and residual is not None:
        total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    elif want_sum and sum_in_fp32 and x.dtype != torch.float32:
        total = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    statistics = common.allocate_statistics(x, 1, is_rms_norm, want_statistics)
    return torch.empty_like(x, memory_format=torch.contiguous_format), total, *statistics


def _forward(x, residual, weight, bias, eps, want_sum, sum_in_fp32, is_rms_norm, want_statistics):
    _check_forward(x, residual, weight, bias)
    out, total, mean, rstd = _allocate(x, residual, want_sum, sum_in_fp32, is_rms_norm, want_statistics)
    if x.numel() == 0:
        return out, total, mean, rstd
    weight, bias = weight.contiguous(), checks.contiguous(bias)
    params = abi.MambaNorm()
    functions = place(params, x)
    other_dtype = x.dtype if residual is None else residual.dtype
    x, params.x_row_stride = common.in_rows(x)
    params.x = x.data_ptr()
    if residual is not None:
        residual, params.residual_row_stride = common.in_rows(residual)
        params.residual = residual.data_ptr()
    if total is not None:
        other_dtype = total.dtype
        params.residual_out = total.data_ptr()
        params.residual_out_row_stride = x.shape[-1]
    width = x.shape[-1]
    common.fill(params, x.numel() // width, x.dtype, weight, bias, width, is_rms_norm, other_dtype)
    params.eps = eps
    params.out = out.data_ptr()
    params.out_row_stride = x.shape[-1]
    if rstd is not None:
        params.rstd = rstd.data_ptr()
        params.mean = None if mean is None else mean.data_ptr()
    run(functions, "norm_forward", params)
    return out, total, mean, rstd


def _forward_fake(x, residual, weight, bias, eps, want_sum, sum_in_fp32, is_rms_norm, want_statistics):
    _check_forward(x, residual, weight, bias)
    return _allocate(x, residual, want_sum, sum_in_fp32, is_rms_norm, want_statistics)


class _AddNorm(torch.autograd.Function):
    """Saves the sum that was normalised (without a residual x), and mean and rstd of each row."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, want_sum, sum_in_fp32, is_rms_norm, want_statistics):
        flags = want_sum or residual is not None, sum_in_fp32, is_rms_norm, True
        out, total, mean, rstd = call_below_autograd(add_norm_op, x, residual, weight, bias, eps, *flags)
        ctx.save_for_backward(x if residual is None else total, weight, bias, mean, rstd)
        ctx.has_residual = residual is not None
        ctx.is_rms_norm = is_rms_norm
        ctx.mark_non_differentiable(*(statistic for statistic in (mean, rstd) if statistic is not None))
        ctx.set_materialize_grads(False)
        return out, total, mean, rstd

    @staticmethod
    def backward(ctx, dout, dtotal, *_):
        total, weight, bias, mean, rstd = ctx.saved_tensors
        if dout is None:  # the norm itself was not used
            return dtotal, dtotal if ctx.has_residual else None, *(None,) * 7
        arguments = dout, dtotal, total, weight, bias, mean, rstd, ctx.is_rms_norm
        dx, dresidual, dweight, dbias = call_in_backward(add_norm_backward_op, *arguments)
        if not ctx.has_residual:
            dresidual = None
        elif dresidual is None:  # of x's dtype
            dresidual = dx
        return dx, dresidual, dweight, dbias, *(None,) * 5


add_norm_op = define(
    "add_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool want_sum, bool sum_in_fp32, "
    "bool is_rms_norm, bool want_statistics) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
    autograd=_AddNorm,
    called=_NAME,
)


# ---- backward operator -----------------------------------------------------------------------------------------------


def _check_backward(dout, dtotal, total, weight, bias, mean, rstd, is_rms_norm):
    name = _NAME + "_backward"
    common.check_rows(name, "dout", dout)
    common.check_parameters(name, dout, weight, bias)
    common.check_beside(name, "sum", total, dout)
    if dtotal is not None:
        if total.dtype == dout.dtype:
            common.check_beside(name, "dsum", dtotal, dout)
        else:
            checks.check_same(name, "dsum", dtotal, total.shape, total, "sum", "(..., N)")
    common.check_statistics(name, dout, 1, mean, rstd, is_rms_norm)


def _allocate_grads(dout, total, weight, bias):
    """dx; dresidual where the sum has another dtype, else it is dx; dweight; dbias."""
    return (
        torch.empty_like(dout, memory_format=torch.contiguous_format),
        None if total.dtype == dout.dtype else torch.empty_like(total, memory_format=torch.contiguous_format),
        weight.new_empty(weight.shape),
        None if bias is None else bias.new_empty(bias.shape),
    )


def _backward(dout, dtotal, total, weight, bias, mean, rstd, is_rms_norm):
    _check_backward(dout, dtotal, total, weight, bias, mean, rstd, is_rms_norm)
    dx, dresidual, dweight, dbias = _allocate_grads(dout, total, weight, bias)
    if dout.numel() == 0:
        return dx, dresidual, dweight.zero_(), None if bias is None else dbias.zero_()
    width = dout.shape[-1]
    weight, bias, rstd, mean = weight.contiguous(), checks.contiguous(bias), rstd.contiguous(), checks.contiguous(mean)
    params = abi.MambaNormBackward()
    functions = place(params, dout)
    other_dtype = total.dtype if dtotal is None else dtotal.dtype
    common.fill(params, dout.numel() // width, dout.dtype, weight, bias, width, is_rms_norm, other_dtype)
    dout, params.dout_row_stride = common.in_rows(dout)
    params.dout = dout.data_ptr()
    if dtotal is not None:
        dtotal, params.dresidual_out_row_stride = common.in_rows(dtotal)
        params.dresidual_out = dtotal.data_ptr()
    total, row_stride = common.in_rows(total)
    if total.dtype == dout.dtype:
        params.x, params.x_row_stride = total.data_ptr(), row_stride
    else:
        params.residual_out, params.residual_out_row_stride = total.data_ptr(), row_stride
        params.dresidual, params.dresidual_row_stride = dresidual.data_ptr(), width
    params.dx, params.dx_row_stride = dx.data_ptr(), width
    workspace = common.fill_gradients(params, functions, mean, rstd, dweight, dbias)
    run(functions, "norm_backward", params)
    del workspace  # until here
    return dx, dresidual, dweight, dbias


def _backward_fake(dout, dtotal, total, weight, bias, mean, rstd, is_rms_norm):
    _check_backward(dout, dtotal, total, weight, bias, mean, rstd, is_rms_norm)
    return _allocate_grads(dout, total, weight, bias)


add_norm_backward_op = define(
    "add_norm_backward(Tensor dout, Tensor? dsum, Tensor sum, Tensor weight, Tensor? bias, Tensor? mean, Tensor rstd, "
    "bool is_rms_norm) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)
