"""The norm's two directions by themselves, with upstream's arguments and results."""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import call
from mamba_ssm.ops.norm.backward import add_norm_backward_op
from mamba_ssm.ops.norm.forward import add_norm_op


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """layer_norm_fn without a gradient: (y, y1, mean, rstd, sum, None, None, None).

    Args:
        x: (M, N), and residual, weight, bias, weight1, bias1, eps, is_rms_norm: as layer_norm_fn has them.
        out_dtype: of y and y1, rounded to it once; x's if None.
        residual_dtype: of the sum where there is no residual; x's if None.

    Returns:
        y (M, N); y1 (M, N), the second norm, None without weight1; mean (M), None of RMSNorm; rstd (M); the sum (M, N)
        that norm_backward takes, x itself if nothing was added. The last three are dropout's seeds and masks.

    Raises:
        NotImplementedError: x1, rowscale or dropout_p is given; layer_norm_fn takes them.

    Same as upstream's mamba_ssm.ops.triton.layer_norm._layer_norm_fwd.
    """
    _refuse("_layer_norm_fwd", x1=x1, rowscale=rowscale, dropout_p=dropout_p or None)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    # The kernels' y has x's dtype.
    computed_in = x.dtype if out_dtype == x.dtype else torch.float32
    beside = residual if residual is None or residual.dtype == computed_in else checks.widen(residual)
    if residual is not None:
        residual_dtype = residual.dtype
    with torch.no_grad():
        flags = residual is not None, False, bool(is_rms_norm), True
        y, total, mean, rstd = call(add_norm_op, x.to(computed_in), beside, weight, bias, float(eps), *flags)
        total = x if total is None else total
        total = total if residual_dtype is None else total.to(residual_dtype)
        y1 = None
        if weight1 is not None:
            source = total if total.dtype == out_dtype else total.float()
            y1, _, _, _ = call(add_norm_op, source, None, weight1, bias1, float(eps), False, False, *flags[2:])
            y1 = y1.to(out_dtype)
    statistics = (None if each is None else each.squeeze(-1) for each in (mean, rstd))
    return y.to(out_dtype), y1, *statistics, total, None, None, None


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
    dy1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    has_residual: bool = False,
    has_x1: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """(dx, dweight, dbias, dresidual, None, dweight1, dbias1), and y with recompute_output; None for what is absent.

    Args:
        dy, dy1: (M, N), the gradients of y and y1. dresidual: (M, N), that of the sum, or None.
        x: the sum that norm_forward returned; mean, rstd: its statistics.
        x_dtype: of dx; the sum's if None. has_residual: a gradient of the residual, of the sum's dtype, is wanted.

    Raises:
        NotImplementedError: seeds, rowscale, dropout_p or has_x1 is given; layer_norm_fn has these gradients.
        ValueError: dy1 without weight1 or the other way round, or recompute_output with them.

    Same as upstream's mamba_ssm.ops.triton.layer_norm._layer_norm_bwd.
    """
    given = {"seeds": seeds, "rowscale": rowscale, "dropout_p": dropout_p or None, "has_x1": has_x1 or None}
    _refuse("_layer_norm_bwd", **given)
    if (dy1 is None) != (weight1 is None):
        raise ValueError("_layer_norm_bwd: dy1 and weight1 must be given together")
    if recompute_output and weight1 is not None:
        raise ValueError("_layer_norm_bwd: recompute_output and weight1 cannot be given together")
    kept = [None if each is None else each.unsqueeze(-1) for each in (mean, rstd)]
    dweight1 = dbias1 = None
    with torch.no_grad():
        # Half precision gradients beside a sum of the other one: everything in float32, which the kernels take.
        total = x if x.dtype == dy.dtype else checks.widen(x)
        dsum = dresidual
        if weight1 is not None:
            dsum, dweight1, dbias1 = _one(dy1, dsum, total, weight1, bias1, kept, is_rms_norm)
        gradient, dweight, dbias = _one(dy, dsum, total, weight, bias, kept, is_rms_norm)
        dx = gradient.to(x_dtype or x.dtype)
        results = dx, dweight, dbias, gradient.to(x.dtype) if has_residual else None, None, dweight1, dbias1
    if not recompute_output:
        return results
    y, *_ = norm_forward(x, weight, bias, eps, out_dtype=dy.dtype, is_rms_norm=is_rms_norm)
    return *results, y


def _one(dy, dsum, total, weight, bias, kept, is_rms_norm):
    """(gradient of the sum, dweight, dbias) of one norm; dsum: what else flows to the sum, or None."""
    dsum = None if dsum is None else dsum.to(total.dtype)
    arguments = dy, dsum, total, weight, bias, *kept, bool(is_rms_norm)
    dx, dresidual, dweight, dbias = call(add_norm_backward_op, *arguments)
    return dx if dresidual is None else dresidual, dweight, dbias


def _refuse(name, **given):
    for argument, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: {argument} cannot be given; call layer_norm_fn or rms_norm_fn, which take it and its gradient"
            )
