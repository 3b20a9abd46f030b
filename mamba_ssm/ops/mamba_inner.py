"""The inside of a Mamba block as one memory-saving autograd node: conv, x_proj, dt_proj, scan, gate and out_proj.

It composes this package's registered operators and plain torch matrix products, so that compilers see all of it.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import torch

from mamba_ssm.ops import _checks as checks
from mamba_ssm.ops._autocast import autocast_dtype, no_autocast
from mamba_ssm.ops._library import call, call_in_backward, may_be_one_node
from mamba_ssm.ops._projections import (
    add_mixed_channels,
    mix_channels,
    mix_channels_last,
    rms_norm_channels,
    rms_norm_channels_grad,
    to_channel_major,
    weight_grad,
)
from mamba_ssm.ops.causal_conv1d import causal_conv1d_backward_op, causal_conv1d_op
from mamba_ssm.ops.selective_scan import selective_scan_op
from mamba_ssm.ops.selective_scan_backward import selective_scan_backward_op

_NAME = "mamba_inner_fn"


def mamba_inner_fn(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B=None,
    C=None,
    D=None,
    delta_bias=None,
    B_proj_bias=None,
    C_proj_bias=None,
    delta_softplus=True,
    checkpoint_lvl=1,
    b_rms_weight=None,
    c_rms_weight=None,
    dt_rms_weight=None,
    b_c_dt_rms_eps=1e-6,
):
    """A Mamba block between its input projection and its residual.

    Args:
        xz: (B, 2D, L), the input projection's x and z; float32, float16 or bfloat16. Fastest in memory as (2D, B, L).
        conv1d_weight: (D, 1, W); conv1d_bias: (D) or None.
        x_proj_weight: (R + N + N, D), without the N rows of a B or C that is given. delta_proj_weight: (D, R).
        out_proj_weight: (d_model, D); out_proj_bias: (d_model) or None. The weights have xz's dtype.
        A: (D, N) float32; D, delta_bias: (D) float32 or None.
        B, C: None to take them from x_proj, else as for selective_scan_fn.
        B_proj_bias, C_proj_bias: (N) or None, added to the B and C that come from x_proj.
        delta_softplus: dt = softplus(delta + delta_bias).
        checkpoint_lvl: 1 computes conv output and delta again in backward, 0 keeps them.
        b_rms_weight, c_rms_weight: (N), dt_rms_weight: (D), or None: RMS norm of B and C from x_proj, and of delta
            before delta_bias, with b_c_dt_rms_eps.

    Returns:
        (B, L, d_model). Under autocast xz and the projections are cast to autocast's dtype; A, D and the bias of delta
        stay float32.

    Same as upstream's mamba_ssm.ops.selective_scan_interface.mamba_inner_fn, without complex A.
    """
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"{_NAME}: checkpoint_lvl must be 0 or 1, got {checkpoint_lvl!r}")
    dtype = autocast_dtype(xz)
    if dtype is not None:
        xz, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias = (
            None if tensor is None else tensor.to(dtype)
            for tensor in (xz, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias)
        )
    elif out_proj_bias is not None:
        out_proj_bias = out_proj_bias.to(xz.dtype)
    _check(xz, conv1d_weight, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C)
    if (b_rms_weight is not None and B is not None) or (c_rms_weight is not None and C is not None):
        raise ValueError(f"{_NAME}: b_rms_weight and c_rms_weight norm the B and C of x_proj, but B or C is given")
    B, C = (checks.widen(matrix) if matrix is not None and matrix.dim() == 2 else matrix for matrix in (B, C))
    tensors = (
        to_channel_major(xz),
        conv1d_weight.squeeze(1),
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        out_proj_weight,
        out_proj_bias,
        checks.widen(A),
        B,
        C,
        checks.widen(D),
        checks.widen(delta_bias),
        B_proj_bias,
        C_proj_bias,
        b_rms_weight,
        c_rms_weight,
        dt_rms_weight,
    )
    options = (bool(delta_softplus), checkpoint_lvl, float(b_c_dt_rms_eps))
    need_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if need_grad and may_be_one_node():
        return _MambaInner.apply(*tensors, *options)
    return _compute(*tensors, *options, keep=False)[0]


def _check(xz, conv1d_weight, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C):
    checks.check_dims(_NAME, "xz", xz, 3, "(B, 2D, L)")
    checks.check_activation_dtype(_NAME, "xz", xz)
    checks.no_complex(_NAME, "A", A)
    checks.check_dims(_NAME, "A", A, 2, "(D, N)")
    dim, dstate = A.shape
    batch, _, seqlen = xz.shape
    checks.check_same(_NAME, "xz", xz, (batch, 2 * dim, seqlen), xz, "itself", "(B, 2D, L) with A (D, N)")
    checks.check_dims(_NAME, "conv1d_weight", conv1d_weight, 3, "(D, 1, W)")
    width = conv1d_weight.shape[2]
    checks.check_float(_NAME, "conv1d_weight", conv1d_weight, (dim, 1, width), xz, "xz", "(D, 1, W)")
    checks.check_dims(_NAME, "delta_proj_weight", delta_proj_weight, 2, "(D, R)")
    rank = delta_proj_weight.shape[1]
    checks.check_same(_NAME, "delta_proj_weight", delta_proj_weight, (dim, rank), xz, "xz", "(D, R)")
    rows = rank + (dstate if B is None else 0) + (dstate if C is None else 0)
    letters = "(R, and N for each of B and C that is not given, D)"
    checks.check_same(_NAME, "x_proj_weight", x_proj_weight, (rows, dim), xz, "xz", letters)
    checks.check_dims(_NAME, "out_proj_weight", out_proj_weight, 2, "(d_model, D)")
    d_model = out_proj_weight.shape[0]
    checks.check_same(_NAME, "out_proj_weight", out_proj_weight, (d_model, dim), xz, "xz", "(d_model, D)")
    if out_proj_bias is not None:
        checks.check_same(_NAME, "out_proj_bias", out_proj_bias, (d_model,), xz, "xz", "(d_model,)")


# ---- forward ---------------------------------------------------------------------------------------------------------


def _convolve(xz, conv1d_weight, conv1d_bias):
    x, z = xz.chunk(2, dim=1)
    return call(causal_conv1d_op, x, conv1d_weight, conv1d_bias, None, None, False, True)[0], x, z


def _delta_of(x_dbl, delta_proj_weight, dt_rms_weight, eps):
    delta = mix_channels(delta_proj_weight, x_dbl[:, : delta_proj_weight.shape[1]])
    return delta if dt_rms_weight is None else rms_norm_channels(delta, dt_rms_weight, eps)


def _split(x_dbl, rank, dstate, B, C):
    """The rows of x_dbl that are B and C, before bias and norm; None for one that is given."""
    raw_B = x_dbl[:, rank : rank + dstate] if B is None else None
    raw_C = x_dbl[:, x_dbl.shape[1] - dstate :] if C is None else None
    return raw_B, raw_C


def _matrix_of(raw, given, proj_bias, rms_weight, eps):
    """B or C as the scan takes it, and what its norm took."""
    if raw is None:
        return given, None
    biased = raw if proj_bias is None else raw + proj_bias.to(raw.dtype)[:, None]
    matrix = biased if rms_weight is None else rms_norm_channels(biased, rms_weight, eps)
    return matrix, biased


def _compute(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B,
    C,
    D,
    delta_bias,
    B_proj_bias,
    C_proj_bias,
    b_rms_weight,
    c_rms_weight,
    dt_rms_weight,
    delta_softplus,
    checkpoint_lvl,
    eps,
    keep,
):
    """Returns the output and what backward starts from: x_dbl, the scan's checkpoints, conv output and delta."""
    conv_out, _, z = _convolve(xz, conv1d_weight, conv1d_bias)
    x_dbl = mix_channels(x_proj_weight, conv_out)
    delta = _delta_of(x_dbl, delta_proj_weight, dt_rms_weight, eps)
    raw_B, raw_C = _split(x_dbl, delta_proj_weight.shape[1], A.shape[1], B, C)
    B, _ = _matrix_of(raw_B, B, B_proj_bias, b_rms_weight, eps)
    C, _ = _matrix_of(raw_C, C, C_proj_bias, c_rms_weight, eps)
    y, _, checkpoints = call(
        selective_scan_op, conv_out, delta, A, B, C, D, z, delta_bias, None, None, delta_softplus, False, keep
    )
    return mix_channels_last(y, out_proj_weight, out_proj_bias), x_dbl, checkpoints, conv_out, delta


# ---- autograd --------------------------------------------------------------------------------------------------------


class _MambaInner(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        out_proj_weight,
        out_proj_bias,
        A,
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        b_rms_weight,
        c_rms_weight,
        dt_rms_weight,
        delta_softplus,
        checkpoint_lvl,
        eps,
    ):
        inputs = (
            xz,
            conv1d_weight,
            conv1d_bias,
            x_proj_weight,
            delta_proj_weight,
            out_proj_weight,
            out_proj_bias,
            A,
            B,
            C,
            D,
            delta_bias,
            B_proj_bias,
            C_proj_bias,
            b_rms_weight,
            c_rms_weight,
            dt_rms_weight,
        )
        out, x_dbl, checkpoints, conv_out, delta = _compute(*inputs, delta_softplus, checkpoint_lvl, eps, keep=True)
        if checkpoint_lvl == 1:
            conv_out = delta = None
        ctx.save_for_backward(*inputs, x_dbl, checkpoints, conv_out, delta)
        ctx.delta_softplus = delta_softplus
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx, dout):
        with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
            grads = _compute_grads(dout, *ctx.saved_tensors, ctx.delta_softplus, ctx.eps)
        return *grads, None, None, None


def _compute_grads(
    dout,
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B,
    C,
    D,
    delta_bias,
    B_proj_bias,
    C_proj_bias,
    b_rms_weight,
    c_rms_weight,
    dt_rms_weight,
    x_dbl,
    checkpoints,
    conv_out,
    delta,
    delta_softplus,
    eps,
):
    """Gradients of _MambaInner's tensors, in their order. Large tensors are let go as soon as they are used."""
    rank, dstate = delta_proj_weight.shape[1], A.shape[1]
    if conv_out is None:
        conv_out, x, z = _convolve(xz, conv1d_weight, conv1d_bias)
        delta = _delta_of(x_dbl, delta_proj_weight, dt_rms_weight, eps)
    else:
        x, z = xz.chunk(2, dim=1)
    raw_B, raw_C = _split(x_dbl, rank, dstate, B, C)
    scan_B, biased_B = _matrix_of(raw_B, B, B_proj_bias, b_rms_weight, eps)
    scan_C, biased_C = _matrix_of(raw_C, C, C_proj_bias, c_rms_weight, eps)

    dout = dout.contiguous()  # (B, L, d_model)
    dout_channels = dout.transpose(1, 2)  # its columns are a view
    dy = mix_channels(out_proj_weight.t(), dout_channels)
    du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, _, y = call_in_backward(
        selective_scan_backward_op,
        dy,
        None,
        conv_out,
        delta,
        A,
        scan_B,
        scan_C,
        D,
        z,
        delta_bias,
        None,
        None,
        checkpoints,
        delta_softplus,
        False,
        True,
    )
    del dy, delta
    dout_proj_weight = weight_grad(dout_channels, y)
    dout_proj_bias = None if out_proj_bias is None else dout.sum((0, 1)).to(out_proj_bias.dtype)
    del y

    ddt_rms_weight = None
    if dt_rms_weight is not None:
        before_norm = mix_channels(delta_proj_weight, x_dbl[:, :rank])
        ddelta, ddt_rms_weight = rms_norm_channels_grad(ddelta, before_norm, dt_rms_weight, eps)
    ddelta_proj_weight = weight_grad(ddelta, x_dbl[:, :rank], batched=True)
    parts = [mix_channels(delta_proj_weight.t(), ddelta, batched=True)]
    del ddelta
    dB_proj_bias = dC_proj_bias = db_rms_weight = dc_rms_weight = None
    if B is None:
        dB, dB_proj_bias, db_rms_weight = _matrix_grads(dB, biased_B, B_proj_bias, b_rms_weight, eps)
        parts.append(dB)
        dB = None
    if C is None:
        dC, dC_proj_bias, dc_rms_weight = _matrix_grads(dC, biased_C, C_proj_bias, c_rms_weight, eps)
        parts.append(dC)
        dC = None
    dx_dbl = torch.cat(parts, dim=1)
    dx_proj_weight = weight_grad(dx_dbl, conv_out, batched=True)
    dconv_out = add_mixed_channels(du, x_proj_weight.t(), dx_dbl)
    del du, conv_out
    dx, dconv1d_weight, dconv1d_bias, _ = call_in_backward(
        causal_conv1d_backward_op, dconv_out, None, x, conv1d_weight, conv1d_bias, None, None, False, True
    )
    del dconv_out
    dxz = torch.cat([dx.transpose(0, 1), dz.transpose(0, 1)]).transpose(0, 1)
    return (
        dxz,
        dconv1d_weight,
        dconv1d_bias,
        dx_proj_weight,
        ddelta_proj_weight,
        dout_proj_weight,
        dout_proj_bias,
        dA,
        dB,
        dC,
        dD,
        ddelta_bias,
        dB_proj_bias,
        dC_proj_bias,
        db_rms_weight,
        dc_rms_weight,
        ddt_rms_weight,
    )


def _matrix_grads(grad, biased, proj_bias, rms_weight, eps):
    """From the gradient of B or C (B, N, L): of its rows of x_dbl, its bias and its norm's weight."""
    drms_weight = None
    if rms_weight is not None:
        grad, drms_weight = rms_norm_channels_grad(grad, biased, rms_weight, eps)
    dproj_bias = None if proj_bias is None else grad.sum((0, 2)).to(proj_bias.dtype)
    return grad, dproj_bias, drms_weight
