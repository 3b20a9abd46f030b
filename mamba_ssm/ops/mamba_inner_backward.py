"""The backward operator of mamba_inner_fn: all gradients of a Mamba block between input projection and residual.

The gradient of xz is one tensor: the scan writes its z rows, the convolution its x rows.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import torch

from mamba_ssm.ops import _checks as checks
from mamba_ssm.ops import _scan_common, causal_conv1d, selective_scan_backward
from mamba_ssm.ops._library import define
from mamba_ssm.ops._mamba_inner_common import Inputs, check, delta_of, matrix_of, split
from mamba_ssm.ops._parts import empty_like
from mamba_ssm.ops._projections import from_columns, rms_norm_channels_grad, to_channel_major, to_columns

_NAME = "mamba_inner_backward"


def _check_backward(dout, inputs, x_dbl, conv_out, delta):
    """The sizes (batch, dim, seqlen, dstate, rank); what the parts' operators check themselves is left to them."""
    check(inputs)
    xz = inputs.xz
    batch, _, seqlen = xz.shape
    dim, dstate = inputs.A.shape
    shape = (batch, seqlen, inputs.out_proj_weight.shape[0])
    checks.check_same(_NAME, "dout", dout, shape, xz, "xz", "(B, L, d_model)")
    shape = (inputs.x_proj_weight.shape[0], batch * seqlen)
    checks.check_same(_NAME, "x_dbl", x_dbl, shape, xz, "xz", "(R + N + N, B * L)")
    if (conv_out is None) != (delta is None):
        raise ValueError(f"{_NAME}: conv_out and delta go together, but one of them is None")
    if conv_out is not None:
        checks.check_same(_NAME, "conv_out", conv_out, (batch, dim, seqlen), xz, "xz", "(B, D, L)")
        checks.check_same(_NAME, "delta", delta, (batch, dim, seqlen), xz, "xz", "(B, D, L)")
    return batch, dim, seqlen, dstate, inputs.delta_proj_weight.shape[1]


def _backward(dout, *arguments):
    inputs, (x_dbl, checkpoints, conv_out, delta, delta_softplus, eps) = Inputs(*arguments[:17]), arguments[17:]
    batch, dim, seqlen, dstate, rank = _check_backward(dout, inputs, x_dbl, conv_out, delta)
    (
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight,
    ) = inputs  # fmt: skip
    columns = batch * seqlen

    def rows(matrix):  # from_columns in one step: views cost as much as allocations
        return matrix.as_strided((batch, dim, seqlen), (seqlen, columns, 1))

    xz = to_channel_major(xz)
    x, z = xz.chunk(2, dim=1)
    conv1d_weight = conv1d_weight.squeeze(1)
    dt, B_rows, C_rows = split(x_dbl, rank, dstate, B, C)
    if conv_out is None:
        conv_out, _ = causal_conv1d._forward(x, conv1d_weight, conv1d_bias, None, None, False, True)
        delta, _ = delta_of(dt, batch, seqlen, delta_proj_weight, dt_rms_weight, eps)
    scan_B, biased_B = matrix_of(B_rows, batch, seqlen, B, B_proj_bias, b_rms_weight, eps)
    scan_C, biased_C = matrix_of(C_rows, batch, seqlen, C, C_proj_bias, c_rms_weight, eps)

    # Large tensors are let go as soon as they are used; the scan's output waits where dx will come.
    dxz = torch.empty_like(xz)
    y, dz = dxz.chunk(2, dim=1)
    dx_dbl = empty_like(x_dbl)
    ddt, dB_rows, dC_rows = split(dx_dbl, rank, dstate, B, C)
    dBC = None
    if B is None and C is None:
        dBC = dB_rows.as_strided((2, batch, dstate, seqlen), (dstate * columns, seqlen, columns, 1))
    dout = dout.reshape(columns, out_proj_weight.shape[0])
    dout_columns = dout.t()
    dy = torch.mm(out_proj_weight.t(), dout_columns)
    du_columns = torch.empty_like(dy)
    ddelta_columns = torch.empty_like(dy)
    du, ddelta = rows(du_columns), rows(ddelta_columns)
    _, _, dA, dB, dC, dD, _, ddelta_bias, _, _ = selective_scan_backward._backward(
        rows(dy), None, conv_out, delta, A, scan_B, scan_C, D, z, delta_bias, None, None,
        checkpoints, delta_softplus, False, True, into=(du, ddelta, dz, y, dBC),
    )  # fmt: skip
    del dy, delta
    dout_proj_weight = torch.mm(dout_columns, to_columns(y).t())
    dout_proj_bias = None if out_proj_bias is None else dout.sum(0)

    ddt_rms_weight = None
    if dt_rms_weight is not None:
        _, projected = delta_of(dt, batch, seqlen, delta_proj_weight, None, eps)
        ddelta, ddt_rms_weight = rms_norm_channels_grad(ddelta, projected, dt_rms_weight, eps)
        ddelta_columns = to_columns(ddelta)
    ddelta_proj_weight = torch.mm(ddelta_columns, dt.t())
    torch.mm(delta_proj_weight.t(), ddelta_columns, out=ddt)
    del ddelta, ddelta_columns
    dB_proj_bias = dC_proj_bias = db_rms_weight = dc_rms_weight = None
    if B is None:
        dB_proj_bias, db_rms_weight = _finish_rows(dB_rows, dB, biased_B, B_proj_bias, b_rms_weight, eps)
        dB = None
    if C is None:
        dC_proj_bias, dc_rms_weight = _finish_rows(dC_rows, dC, biased_C, C_proj_bias, c_rms_weight, eps)
        dC = None
    dx_proj_weight = torch.mm(dx_dbl, to_columns(conv_out).t())
    del conv_out
    du_columns.addmm_(x_proj_weight.t(), dx_dbl)  # du is the convolution's whole gradient from here on
    _, dconv1d_weight, dconv1d_bias, _ = causal_conv1d._backward(
        du, None, x, conv1d_weight, conv1d_bias, None, None, False, True, dx=y
    )
    return (
        dxz,
        dconv1d_weight.unsqueeze(1),
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


def _finish_rows(rows, grad, biased, proj_bias, rms_weight, eps):
    """Makes rows (N, B*L) the gradient of B's or C's rows of x_dbl, from grad (B, N, L); None if rows holds it already.

    Returns the gradients of the bias and of the norm's weight. biased: (B, N, L), what the norm took.
    """
    batch, _, seqlen = biased.shape
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
    batch, dim, seqlen, dstate, _ = _check_backward(dout, inputs, x_dbl, conv_out, delta)
    xz = inputs.xz
    x, z = xz.chunk(2, dim=1)
    causal_conv1d._check(x, inputs.conv1d_weight.squeeze(1), inputs.conv1d_bias, None, None)
    B, C = (xz.new_empty((batch, dstate, seqlen)) if given is None else given for given in (inputs.B, inputs.C))
    _scan_common.check(x, x, inputs.A, B, C, inputs.D, z, inputs.delta_bias, None, None)
    others = (tensor for tensor in (*inputs[1:], checkpoints) if tensor is not None)
    _scan_common.check_fake(_NAME, xz, *others)
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
