"""The backward operator of mamba_inner_fn: all gradients of a Mamba block between input projection and residual.

The gradient of xz is one tensor: the scan writes its z rows, the convolution its x rows.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import torch

from mamba_ssm._torch import define
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.causal_conv1d import forward as causal_conv1d
from mamba_ssm.ops.mamba_block.arguments import Inputs, channel_major, channels, check, convolve, delta_of, scan_matrix
from mamba_ssm.ops.mamba_block.projections import from_columns, rms_norm_channels_grad, to_columns
from mamba_ssm.ops.selective_scan.arguments import check_fake, checkpoint_size
from mamba_ssm.ops.selective_scan.backward import launch_backward as launch_scan_backward

_NAME = "mamba_inner_backward"


def _check_backward(dout, inputs, x_dbl, checkpoints, conv_out, delta):
    """Raises on tensors that do not fit; returns the sizes."""
    sizes = batch, dim, seqlen, dstate, *_ = check(inputs)
    xz = inputs.xz
    shape = (batch, seqlen, inputs.out_proj_weight.shape[0])
    checks.check_same(_NAME, "dout", dout, shape, xz, "xz", "(B, L, d_model)")
    shape = (inputs.x_proj_weight.shape[0], batch * seqlen)
    checks.check_same(_NAME, "x_dbl", x_dbl, shape, xz, "xz", "(R + N + N, B * L)")
    shape = (checkpoint_size(batch, dim, seqlen, dstate),)
    checks.check_float32(_NAME, "checkpoints", checkpoints, shape, xz, "xz", "(B * (L-1)//64 * D * N + 2,)")
    if (conv_out is None) != (delta is None):
        raise ValueError(f"{_NAME}: conv_out and delta go together, but one of them is None")
    if conv_out is not None:
        shape = (dim, batch * seqlen)
        checks.check_same(_NAME, "conv_out", conv_out, shape, xz, "xz", "(D, B * L)")
        checks.check_same(_NAME, "delta", delta, shape, xz, "xz", "(D, B * L)")
    return sizes


def _backward(dout, *arguments):
    inputs, (x_dbl, checkpoints, conv_out, delta, delta_softplus, eps) = Inputs(*arguments[:17]), arguments[17:]
    sizes = batch, dim, seqlen, dstate, *_ = _check_backward(dout, inputs, x_dbl, checkpoints, conv_out, delta)
    (
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight,
    ) = inputs  # fmt: skip
    columns = sizes.columns
    if columns == 0:
        return tuple(None if tensor is None else torch.zeros_like(tensor) for tensor in inputs)

    xz, x_dbl = channel_major(xz, sizes), x_dbl.contiguous()
    x, z = channels(xz, sizes), channels(xz, sizes, dim)
    rank, C_row = sizes.rank, sizes.C_row
    dt = x_dbl[:rank]
    if conv_out is None:
        conv_out = convolve(xz, inputs, sizes)
        delta = delta_of(dt, batch, seqlen, delta_proj_weight, dt_rms_weight, eps)
    conv_out, delta = conv_out.contiguous(), delta.contiguous()
    both = B is None and C is None
    scan_B, biased_B = scan_matrix(x_dbl, rank, sizes, B, B_proj_bias, b_rms_weight, eps, view=both)
    scan_C, biased_C = scan_matrix(x_dbl, C_row, sizes, C, C_proj_bias, c_rms_weight, eps, view=both)

    # Large tensors are let go as soon as they are used; the scan's output waits where dx will come.
    dxz = xz.new_empty((2 * dim, columns))
    y, dz = channels(dxz, sizes), channels(dxz, sizes, dim)
    dx_dbl = empty_like(x_dbl)
    dBC = None
    if both:
        dBC = dx_dbl.as_strided((2, batch, dstate, seqlen), (dstate * columns, seqlen, columns, 1), rank * columns)
    dout = dout.reshape(columns, out_proj_weight.shape[0])
    dout_columns = dout.t()
    dy = torch.mm(out_proj_weight.t(), dout_columns)
    du = torch.empty_like(dy)
    ddelta = torch.empty_like(dy)
    A, D, delta_bias = (checks.contiguous(tensor) for tensor in (A, D, delta_bias))
    scan = channels(conv_out, sizes), channels(delta, sizes), A, scan_B, scan_C, D, z, delta_bias, None, None
    into = channels(du, sizes), channels(ddelta, sizes), dz, None, y
    dA, dB, dC, dD, ddelta_bias = launch_scan_backward(
        sizes.scan, channels(dy, sizes), None, scan, checkpoints.contiguous(), delta_softplus, into, dBC
    )
    del dy, delta
    dout_proj_weight = torch.mm(dout_columns, dxz[:dim].t())
    dout_proj_bias = None if out_proj_bias is None else dout.sum(0)

    ddt_rms_weight = None
    if dt_rms_weight is not None:
        projected = from_columns(torch.mm(delta_proj_weight, dt), batch, seqlen)
        ddelta = from_columns(ddelta, batch, seqlen)
        ddelta, ddt_rms_weight = rms_norm_channels_grad(ddelta, projected, dt_rms_weight, eps)
        ddelta = to_columns(ddelta)
    ddelta_proj_weight = torch.mm(ddelta, dt.t())
    torch.mm(delta_proj_weight.t(), ddelta, out=dx_dbl[:rank])
    del ddelta
    dB_proj_bias = dC_proj_bias = db_rms_weight = dc_rms_weight = None
    if B is None:
        dB_proj_bias, db_rms_weight = _finish_rows(dx_dbl, rank, sizes, dB, biased_B, B_proj_bias, b_rms_weight, eps)
        dB = None
    if C is None:
        dC_proj_bias, dc_rms_weight = _finish_rows(dx_dbl, C_row, sizes, dC, biased_C, C_proj_bias, c_rms_weight, eps)
        dC = None
    dx_proj_weight = torch.mm(dx_dbl, conv_out.t())
    del conv_out
    du.addmm_(x_proj_weight.t(), dx_dbl)  # du is the convolution's whole gradient from here on
    conv1d = conv1d_weight.contiguous(), checks.contiguous(conv1d_bias)
    dconv1d_weight, dconv1d_bias = causal_conv1d.launch_backward(
        sizes.conv1d, channels(du, sizes), None, x, *conv1d, None, None, True, y, None
    )
    return (
        from_columns(dxz, batch, seqlen),
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


def _finish_rows(dx_dbl, first, sizes, grad, biased, proj_bias, rms_weight, eps):
    """Makes rows of dx_dbl, from the first on, the gradient of B or C, from grad (B, N, L); None if it is there.

    Returns the gradients of the bias and of the norm's weight. biased: (B, N, L), what the norm took.
    """
    if grad is None and proj_bias is None and rms_weight is None:
        return None, None
    rows, batch, seqlen = dx_dbl[first : first + sizes.dstate], sizes.batch, sizes.seqlen
    drms_weight = None
    if rms_weight is not None:
        grad = from_columns(rows, batch, seqlen) if grad is None else grad
        grad, drms_weight = rms_norm_channels_grad(grad, biased, rms_weight, eps)
    if grad is not None:
        from_columns(rows, batch, seqlen).copy_(grad)
    dproj_bias = None if proj_bias is None else rows.sum(1).to(proj_bias.dtype)
    return dproj_bias, drms_weight


def _backward_fake(dout, *arguments):
    inputs, (x_dbl, checkpoints, conv_out, delta, _, _) = Inputs(*arguments[:17]), arguments[17:]
    batch, dim, seqlen, *_ = _check_backward(dout, inputs, x_dbl, checkpoints, conv_out, delta)
    xz = inputs.xz
    check_fake(_NAME, xz, *(tensor for tensor in (*inputs[1:], checkpoints) if tensor is not None))
    dxz = xz.new_empty((2 * dim, batch, seqlen)).transpose(0, 1)
    # B and C that come from x_proj are None here, and so are their gradients
    return dxz, *(None if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs[1:])


mamba_inner_backward_op = define(
    "mamba_inner_backward(Tensor dout, Tensor xz, Tensor conv1d_weight, Tensor? conv1d_bias, Tensor x_proj_weight, "
    "Tensor delta_proj_weight, Tensor out_proj_weight, Tensor? out_proj_bias, Tensor A, Tensor? B, Tensor? C, "
    "Tensor? D, Tensor? delta_bias, Tensor? B_proj_bias, Tensor? C_proj_bias, Tensor? b_rms_weight, Tensor? "
    "c_rms_weight, Tensor? dt_rms_weight, Tensor x_dbl, Tensor checkpoints, Tensor? conv_out, Tensor? delta, bool "
    "delta_softplus, float eps) -> (Tensor dxz, Tensor dconv1d_weight, Tensor dconv1d_bias, Tensor dx_proj_weight, "
    "Tensor ddelta_proj_weight, Tensor dout_proj_weight, Tensor dout_proj_bias, Tensor dA, Tensor dB, Tensor dC, "
    "Tensor dD, Tensor ddelta_bias, Tensor dB_proj_bias, Tensor dC_proj_bias, Tensor db_rms_weight, Tensor "
    "dc_rms_weight, Tensor ddt_rms_weight)",
    _backward,
    _backward_fake,
)
