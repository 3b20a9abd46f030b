"""LayerNorm and RMSNorm of a residual stream: the sum with the residual and its norm in one pass."""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import (
    autocast_dtype,
    call,
    call_below_autograd,
    call_in_backward,
    define,
    make,
    no_gradients,
    reference,
    returns,
    signature,
    unpack,
)
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.norm import arguments as common
from mamba_ssm.ops.norm.backward import add_norm_backward_op
from mamba_ssm.ops.norm.reference import layer_norm_ref

_NAME = "layer_norm"


def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
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
    if type(dropout_p) is not float:
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
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """layer_norm_fn with is_rms_norm=True: x / rms(x) * weight + bias.

    Same as upstream's mamba_ssm.ops.triton.layer_norm.rms_norm_fn.
    """
    options = eps, dropout_p, rowscale, prenorm, residual_in_fp32, True, return_dropout_mask
    return layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, *options)


def layer_norm_linear_fn(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
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

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.dropout_p = dropout_p
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
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
    if reference.on:
        options = {"eps": eps, "prenorm": True, "is_rms_norm": is_rms_norm}
        out, total = layer_norm_ref(x, weight, bias, residual, **options)
        if residual is None and sum_in_fp32:
            total = x.to(working_dtype(x))
        return out, total if want_sum else None
    beside = residual
    try:
        if residual is not None and residual.dtype != x.dtype:
            beside = checks.widen(residual)  # the kernels take float32 beside any x
    except AttributeError:  # of what is no tensor; the operator names it
        pass
    if type(eps) is not float:  # on the way of every call
        eps = checks.check_number(_NAME, "eps", eps)
    flags = bool(want_sum), bool(sum_in_fp32), bool(is_rms_norm), False
    out, total, _, _ = call(add_norm_op, x, beside, weight, bias, eps, *flags)
    if not want_sum:
        return out, None
    if total is None:
        return out, x
    return out, total if beside is residual else total.to(residual.dtype)


# ---- operator --------------------------------------------------------------------------------------------------------


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operator takes."""

    eps: float
    want_sum: bool
    sum_in_fp32: bool
    is_rms_norm: bool
    want_statistics: bool


class Results(typing.NamedTuple):
    """sum: None where it is not wanted, or x itself. mean and rstd: None where they are not wanted, mean of RMSNorm."""

    out: torch.Tensor
    sum: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None


def _check(inputs):
    common.check_rows(_NAME, "x", inputs.x)
    common.check_parameters(_NAME, inputs.x, inputs.weight, inputs.bias)
    if inputs.residual is not None:
        common.check_beside(_NAME, "residual", inputs.residual, inputs.x)


def _allocate(inputs, options):
    """The operator's outputs, without values."""
    x, total = inputs.x, None
    if options.want_sum and inputs.residual is not None:
        total = empty_like(inputs.residual)
    elif options.want_sum and options.sum_in_fp32 and x.dtype != torch.float32:
        total = empty_like(x, torch.float32)
    statistics = common.allocate_statistics(x, 1, options.is_rms_norm, options.want_statistics)
    return make(Results, (empty_like(x), total, *statistics))


def _forward(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    _check(inputs)
    results, x, residual = _allocate(inputs, options), inputs.x, inputs.residual
    if x.numel() == 0:
        return results
    weight, bias = inputs.weight.contiguous(), checks.contiguous(inputs.bias)
    out, total, mean, rstd = results
    width = x.shape[-1]
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
        params.residual_out_row_stride = width
    common.fill(params, x.numel() // width, x.dtype, weight, bias, width, options.is_rms_norm, other_dtype)
    params.eps = options.eps
    params.out = out.data_ptr()
    params.out_row_stride = width
    if rstd is not None:
        params.rstd = rstd.data_ptr()
        params.mean = pointer(mean)
    run(functions, "norm_forward", params)
    return results


def _forward_fake(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    _check(inputs)
    return _allocate(inputs, options)


class _AddNorm(torch.autograd.Function):
    """Saves the sum that was normalised (without a residual x), and mean and rstd of each row."""

    @staticmethod
    def forward(ctx, *arguments):
        x, residual, weight, bias, *options = arguments
        eps, want_sum, sum_in_fp32, ctx.is_rms_norm, _ = options
        ctx.has_residual = residual is not None
        flags = want_sum or ctx.has_residual, sum_in_fp32, ctx.is_rms_norm, True
        out, total, mean, rstd = call_below_autograd(add_norm_op, x, residual, weight, bias, eps, *flags)
        ctx.save_for_backward(total if ctx.has_residual else x, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(*(statistic for statistic in (mean, rstd) if statistic is not None))
        ctx.set_materialize_grads(False)
        return out, total, mean, rstd

    @staticmethod
    def backward(ctx, dout, dtotal, *_):
        if dout is None:  # the norm itself was not used
            dx, dresidual, dweight, dbias = dtotal, dtotal, None, None
        else:
            arguments = dout, dtotal, *ctx.saved_tensors, ctx.is_rms_norm
            dx, dresidual, dweight, dbias = call_in_backward(add_norm_backward_op, *arguments)
        if not ctx.has_residual:
            dresidual = None
        elif dresidual is None:  # of x's dtype
            dresidual = dx
        return dx, dresidual, dweight, dbias, *no_gradients(Options)


add_norm_op = define(
    f"add_norm({signature(Inputs, Options)}) -> {returns(Results)}",
    _forward,
    _forward_fake,
    autograd=_AddNorm,
    called=_NAME,
    planned=(),
)
