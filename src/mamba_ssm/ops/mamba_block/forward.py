"""The inside of a Mamba block as one memory-saving autograd node: conv, x_proj, dt_proj, scan, gate and out_proj; and
mamba_block, the same with in_proj in front.

Forward composes this package's registered operators and plain torch matrix products, so that compilers see all of it
and exported programs have gradients. Backward is one operator, mamba_ssm.ops.mamba_block.backward.
Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._torch import (
    apply,
    autocast_dtype,
    call,
    call_in_backward,
    no_autocast,
    refuse_second_derivatives,
    refuse_what_is_no_dense_tensor,
    unwatched,
    wants_one_node,
)
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.causal_conv1d.forward import causal_conv1d_op
from mamba_ssm.ops.mamba_block.arguments import (
    Inputs,
    channel_major,
    channels,
    check,
    convolve,
    delta_of,
    matrix_of,
    scan_matrix,
    split,
)
from mamba_ssm.ops.mamba_block.backward import mamba_inner_backward_op
from mamba_ssm.ops.mamba_block.projections import from_columns, project_in, to_channel_major, to_columns
from mamba_ssm.ops.selective_scan.arguments import checkpoint_size
from mamba_ssm.ops.selective_scan.forward import launch_forward as launch_scan
from mamba_ssm.ops.selective_scan.forward import selective_scan_op

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
    if not isinstance(checkpoint_lvl, int) or checkpoint_lvl not in (0, 1):
        raise ValueError(f"{_NAME}: checkpoint_lvl must be 0 or 1, got {checkpoint_lvl!r}")
    checks.check_tensor(_NAME, "xz", xz)
    dtype = autocast_dtype(xz)
    if dtype is not None:
        xz, x_proj_weight, delta_proj_weight, out_proj_weight = (
            checks.cast(tensor, dtype) for tensor in (xz, x_proj_weight, delta_proj_weight, out_proj_weight)
        )
    if out_proj_bias is not None:
        out_proj_bias = checks.cast(out_proj_bias, xz.dtype)
    if B is not None:
        B = _given(B, dtype)
    if C is not None:
        C = _given(C, dtype)
    inputs = Inputs(
        xz,
        conv1d_weight,
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
    delta_softplus, eps = bool(delta_softplus), checks.check_number(_NAME, "b_c_dt_rms_eps", b_c_dt_rms_eps)
    if wants_one_node(inputs):
        return apply(_MambaInner, *inputs, delta_softplus, checkpoint_lvl, eps)
    return _compute(inputs, delta_softplus, eps, keep=False)[0]


def mamba_block(
    hidden_states,
    in_proj_weight,
    in_proj_bias,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    dt_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A_log,
    D,
    dt_bias,
):
    """mamba_inner_fn from the block's input on: hidden_states (B, L, d_model) -> (B, L, d_model), for modules.Mamba.

    in_proj_weight: (2D, d_model); in_proj_bias: (2D) or None. A_log: (D, N), where A = -exp(A_log); D, dt_bias: (D).
    The others as for mamba_inner_fn. One autograd node, which keeps what mamba_inner_fn's and the projection's would:
    a training step of a small block is bound by the time that Python and autograd take, not by the kernels.
    """
    inner = conv1d_weight, conv1d_bias, x_proj_weight, dt_proj_weight, out_proj_weight, out_proj_bias
    if not wants_one_node((hidden_states, in_proj_weight, in_proj_bias, *inner, A_log, D, dt_bias)):
        xz = project_in(hidden_states, in_proj_weight, in_proj_bias)
        A = -torch.exp(A_log.float())
        return mamba_inner_fn(xz, *inner, A, D=D.float(), delta_bias=dt_bias.float())
    return apply(_MambaBlock, hidden_states, in_proj_weight, in_proj_bias, *inner, A_log, D, dt_bias)


def _given(matrix, dtype):
    """A B or C that does not come from x_proj: a constant (D, N) is a parameter, a variable one an activation."""
    if isinstance(matrix, torch.Tensor) and matrix.dim() == 2:
        return checks.widen(matrix)
    return matrix if dtype is None else checks.cast(matrix, dtype)


# ---- forward ---------------------------------------------------------------------------------------------------------


def _compute(inputs, delta_softplus, eps, keep):
    """Returns the output and what backward starts from: x_dbl, the scan's checkpoints, conv output and delta.

    x_dbl (R + N + N, B*L), conv output and delta (D, B*L) are matrices.
    """
    try:
        sizes = check(inputs)
        if unwatched(inputs) and inputs.xz.numel():
            return _compute_now(inputs, sizes, delta_softplus, eps, keep)
    except (AttributeError, RuntimeError):
        refuse_what_is_no_dense_tensor(_NAME, inputs._asdict())
        raise
    xz, A, delta_proj_weight = inputs.xz, inputs.A, inputs.delta_proj_weight
    batch, _, seqlen = xz.shape
    x, z = to_channel_major(xz).chunk(2, dim=1)
    conv_inputs = x, inputs.conv1d_weight.squeeze(1), inputs.conv1d_bias, None, None
    conv_out, _ = call(causal_conv1d_op, *conv_inputs, False, True)
    conv_columns = to_columns(conv_out)
    x_dbl = torch.mm(inputs.x_proj_weight, conv_columns)
    dt, B_rows, C_rows = split(x_dbl, delta_proj_weight.shape[1], A.shape[1], inputs.B, inputs.C)
    delta_columns = delta_of(dt, batch, seqlen, delta_proj_weight, inputs.dt_rms_weight, eps)
    B, _ = matrix_of(B_rows, batch, seqlen, inputs.B, inputs.B_proj_bias, inputs.b_rms_weight, eps)
    C, _ = matrix_of(C_rows, batch, seqlen, inputs.C, inputs.C_proj_bias, inputs.c_rms_weight, eps)
    delta = from_columns(delta_columns, batch, seqlen)
    scan_inputs = conv_out, delta, A, B, C, inputs.D, z, inputs.delta_bias, None, None
    y, _, checkpoints = call(selective_scan_op, *scan_inputs, delta_softplus, False, keep)
    out = F.linear(to_columns(y).t(), inputs.out_proj_weight, inputs.out_proj_bias)
    return out.view(batch, seqlen, out.shape[1]), x_dbl, checkpoints, conv_columns, delta_columns


def _compute_now(inputs, sizes, delta_softplus, eps, keep):
    """_compute where nobody watches operators: straight to the kernels, without a tensor for each view and without
    checking again, which saves a quarter of a small block's time.
    """
    batch, dim, seqlen, dstate, *_ = sizes
    xz = channel_major(inputs.xz, sizes)
    conv_out = convolve(xz, inputs, sizes)
    x_dbl = torch.mm(inputs.x_proj_weight, conv_out)
    dt = x_dbl[: sizes.rank]
    delta = delta_of(dt, batch, seqlen, inputs.delta_proj_weight, inputs.dt_rms_weight, eps).contiguous()
    B, _ = scan_matrix(x_dbl, sizes.rank, sizes, inputs.B, inputs.B_proj_bias, inputs.b_rms_weight, eps)
    C, _ = scan_matrix(x_dbl, sizes.C_row, sizes, inputs.C, inputs.C_proj_bias, inputs.c_rms_weight, eps)
    A, D, delta_bias = (checks.contiguous(tensor) for tensor in (inputs.A, inputs.D, inputs.delta_bias))
    y = torch.empty_like(conv_out)
    checkpoints = A.new_empty((checkpoint_size(batch, dim, seqlen, dstate),)) if keep else None
    x, z = channels(conv_out, sizes), channels(xz, sizes, dim)
    scan_inputs = x, channels(delta, sizes), A, B, C, D, z, delta_bias, None, None
    launch_scan(sizes.scan, scan_inputs, delta_softplus, channels(y, sizes), None, checkpoints)
    out = F.linear(y.t(), inputs.out_proj_weight, inputs.out_proj_bias)
    return out.view(batch, seqlen, out.shape[1]), x_dbl, checkpoints, conv_out, delta


# ---- autograd --------------------------------------------------------------------------------------------------------


class _MambaInner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *tensors, delta_softplus, checkpoint_lvl, eps = arguments
        out, x_dbl, checkpoints, conv_out, delta = _compute(Inputs(*tensors), delta_softplus, eps, keep=True)
        if checkpoint_lvl == 1:
            conv_out = delta = None
        ctx.save_for_backward(*tensors, x_dbl, checkpoints, conv_out, delta)
        ctx.delta_softplus = delta_softplus
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx, dout):
        with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
            grads = call_in_backward(mamba_inner_backward_op, dout, *ctx.saved_tensors, ctx.delta_softplus, ctx.eps)
        return *grads, None, None, None


class _MambaBlock(torch.autograd.Function):
    """_MambaInner with the input projection in front and A_log in place of A."""

    @staticmethod
    def forward(ctx, hidden_states, in_proj_weight, in_proj_bias, *arguments):
        *weights, out_proj_bias, A_log, D, dt_bias = arguments
        dtype = autocast_dtype(hidden_states)
        if dtype is not None:
            hidden_states, in_proj_weight = checks.cast(hidden_states, dtype), checks.cast(in_proj_weight, dtype)
            conv1d_weight, conv1d_bias, *projections = weights
            weights = conv1d_weight, conv1d_bias, *(checks.cast(weight, dtype) for weight in projections)
        xz = project_in(hidden_states, in_proj_weight, in_proj_bias)
        if out_proj_bias is not None:
            out_proj_bias = out_proj_bias.to(xz.dtype)
        A = -torch.exp(A_log.float())
        inputs = Inputs(xz, *weights, out_proj_bias, A, None, None, D.float(), dt_bias.float(), *(None,) * 5)
        out, x_dbl, checkpoints, _, _ = _compute(inputs, True, 0.0, keep=True)
        need_input, need_weight, *_ = ctx.needs_input_grad
        kept = in_proj_weight if need_input else None, hidden_states if need_weight else None
        ctx.save_for_backward(*kept, *inputs, x_dbl, checkpoints, None, None)
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives("the gradient of Mamba")
        in_proj_weight, hidden_states, *saved = ctx.saved_tensors
        with no_autocast(dout):  # as in _MambaInner
            grads = Inputs(*call_in_backward(mamba_inner_backward_op, dout, *saved, True, 0.0))
            batch, _, seqlen = grads.xz.shape
            dxz = to_columns(grads.xz)
            dhidden_states = din_proj_weight = None
            if in_proj_weight is not None:
                dhidden_states = torch.mm(dxz.t(), in_proj_weight).view(batch, seqlen, in_proj_weight.shape[1])
            if hidden_states is not None:
                din_proj_weight = torch.mm(dxz, hidden_states.reshape(batch * seqlen, hidden_states.shape[2]))
            din_proj_bias = dxz.sum(1) if ctx.needs_input_grad[2] else None
            dA_log = grads.A * Inputs(*saved[:17]).A  # A = -exp(A_log) is its own derivative
        inner = grads[1:7]  # from conv1d_weight to out_proj_bias
        # autograd takes each gradient to its input's dtype
        return dhidden_states, din_proj_weight, din_proj_bias, *inner, dA_log, grads.D, grads.delta_bias
