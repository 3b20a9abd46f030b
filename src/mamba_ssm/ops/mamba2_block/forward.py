"""Convolution, scan, gate and norm of a Mamba-2 block as one operator, which writes the parts of a tensor in place.

The input projection's output zxbcdt is cut, not copied, and its gradient is one tensor that each kernel writes its part
of. The parts go to the kernels as addresses, and arguments are checked once, not by each part's operator: in a small
block that is half of the time. On CUDA a NaN reaches all of its tile of up to 64 steps, as in mamba_ssm.ops.ssd.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm._native.launch import View
from mamba_ssm._torch import call_below_autograd, call_in_backward, define
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.causal_conv1d import forward as causal_conv1d
from mamba_ssm.ops.causal_conv1d.arguments import check_weight
from mamba_ssm.ops.norm import gated as gated_norm
from mamba_ssm.ops.norm import swiglu
from mamba_ssm.ops.norm.arguments import in_rows
from mamba_ssm.ops.ssd import arguments as ssd_arguments
from mamba_ssm.ops.ssd import backward as ssd_backward
from mamba_ssm.ops.ssd import forward as ssd

_NAME = "mamba_split_conv1d_scan_combined"


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    zxbcdt: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    dt_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor | None
    initial_states: torch.Tensor | None
    seq_idx: torch.Tensor | None
    rmsnorm_weight: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else both operators take, in their order."""

    headdim: int
    ngroups: int
    dt_min: float
    dt_max: float
    silu: bool
    rmsnorm_eps: float
    norm_before_gate: bool
    A_is_log: bool  # A is a layer's A_log = log(-A); it and dt_bias may be float16 or bfloat16 too; dA is A_log's


def _named(arguments):
    """Inputs, options, and the arguments behind them."""
    return Inputs(*arguments[:9]), Options(*arguments[9:17]), arguments[17:]


class _Sizes(typing.NamedTuple):
    batch: int
    seqlen: int
    d_mlp: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    dim: int  # channels of the scan, H P
    channels: int  # of the convolution, H P + 2 G N
    width: int  # of the convolution

    @property
    def empty(self):
        """Whether there is nothing to convolve and to scan."""
        return self.batch * self.seqlen * self.nheads == 0

    @property
    def scan(self):
        """As the scan's launchers take them."""
        return self.batch, self.seqlen, self.nheads, self.headdim, self.ngroups, self.dstate

    @property
    def conv1d(self):
        """As the convolution's launchers take them."""
        return self.batch, self.channels, self.seqlen, self.width


def _check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx, rmsnorm_weight = inputs
    headdim, ngroups = options.headdim, options.ngroups
    if zxbcdt.dim() != 3 or A.dim() != 1 or conv1d_weight.dim() != 2 or zxbcdt.dtype not in checks.FLOAT_DTYPES:
        checks.check_dims(_NAME, "zxbcdt", zxbcdt, 3, "(B, L, 2 d_mlp + 2 H P + 2 G N + H)")
        checks.check_activation_dtype(_NAME, "zxbcdt", zxbcdt)
        checks.check_dims(_NAME, "A_log" if options.A_is_log else "A", A, 1, "(H,)")
        checks.check_dims(_NAME, "conv1d_weight", conv1d_weight, 2, "(H P + 2 G N, W)")
    batch, seqlen, columns = zxbcdt.shape
    nheads, channels = A.shape[0], conv1d_weight.shape[0]
    dim = nheads * headdim
    if ngroups != 1:
        checks.check_groups(_NAME, f"nheads ({nheads})", nheads, ngroups)
    dstate = (channels - dim) // (2 * ngroups)  # not divmod: sizes may be symbols
    if headdim < 1 or dstate < 1 or channels != dim + 2 * ngroups * dstate:
        raise ValueError(
            f"{_NAME}: conv1d_weight must have H P + 2 G N rows with H = {nheads}, P = {headdim}, G = {ngroups}, "
            f"got {channels}"
        )
    d_mlp = (columns - dim - channels - nheads) // 2
    if d_mlp < 0 or columns != 2 * d_mlp + dim + channels + nheads:
        raise ValueError(
            f"{_NAME}: zxbcdt must have 2 d_mlp + 2 H P + 2 G N + H columns, {dim + channels + nheads} without d_mlp, "
            f"got {columns}"
        )
    width = check_weight(_NAME, zxbcdt, channels, conv1d_weight, conv1d_bias, "zxbcdt", "conv1d_")
    sizes = _Sizes(batch, seqlen, d_mlp, nheads, headdim, ngroups, dstate, dim, channels, width)
    ssd_arguments.check_head(_NAME, headdim, dstate)
    dt_limit = options.dt_min, options.dt_max
    parameters = A, D, dt_bias, initial_states, seq_idx
    ssd_arguments.check_parameters(_NAME, sizes.scan, zxbcdt, "zxbcdt", *parameters, *dt_limit, options.A_is_log)
    if rmsnorm_weight is not None:
        checks.check_float(_NAME, "rmsnorm_weight", rmsnorm_weight, (dim,), zxbcdt, "zxbcdt", "(H P,)")
    return sizes


def _kernel_layout(inputs):
    """The inputs as the kernels take them, and the stride of zxbcdt's rows; parameters and states contiguous."""
    zxbcdt, row_stride = in_rows(inputs.zxbcdt)
    return Inputs(zxbcdt, *map(checks.contiguous, inputs[1:])), row_stride


def _cut(zxbcdt, row_stride, sizes):
    """z (B, L, H, P), xBC (B, H P + 2 G N, L) and dt (B, L, H) of zxbcdt, or of its gradient."""
    batch_stride = sizes.seqlen * row_stride
    start = 2 * sizes.d_mlp
    z = View(zxbcdt, start, batch_stride, row_stride, sizes.headdim, 1)
    xBC = View(zxbcdt, start + sizes.dim, batch_stride, 1, row_stride)
    return z, xBC, View(zxbcdt, start + sizes.dim + sizes.channels, batch_stride, row_stride, 1)


def _cut_xBC(xBC, sizes):
    """Of xBC (B, L, H P + 2 G N), contiguous: itself as (B, H P + 2 G N, L), x (B, L, H, P), B and C (B, L, G, N)."""
    row_stride, dim, dstate = sizes.channels, sizes.dim, sizes.dstate
    batch_stride = sizes.seqlen * row_stride
    x = View(xBC, 0, batch_stride, row_stride, sizes.headdim, 1)
    B = View(xBC, dim, batch_stride, row_stride, dstate, 1)
    C = View(xBC, dim + sizes.ngroups * dstate, batch_stride, row_stride, dstate, 1)
    return View(xBC, 0, batch_stride, 1, row_stride), x, B, C


def _heads(tensor, sizes, start=0):
    """H P columns of tensor (B, L, columns), contiguous, as (B, L, H, P)."""
    row_stride = tensor.shape[2]
    return View(tensor, start, sizes.seqlen * row_stride, row_stride, sizes.headdim, 1)


def _mlp(tensor, sizes):
    """The columns of the gated MLP's input in zxbcdt, or in its gradient."""
    return tensor.narrow(2, 0, 2 * sizes.d_mlp)


# ---- forward operator ------------------------------------------------------------------------------------------------


def _allocate(inputs, sizes, return_final_states, keep):
    """The operator's outputs, without values."""
    zxbcdt, A, norm = inputs.zxbcdt, inputs.A, inputs.rmsnorm_weight is not None
    batch, seqlen, dim = sizes.batch, sizes.seqlen, sizes.dim
    out = zxbcdt.new_empty((batch, seqlen, sizes.d_mlp + dim))
    y = zxbcdt.new_empty((batch, seqlen, dim)) if norm and keep else None
    float32 = {"dtype": torch.float32}
    rstd = A.new_empty((batch, seqlen, sizes.ngroups), **float32) if norm and keep else None
    states = (batch, sizes.nheads, sizes.headdim, sizes.dstate)
    states = A.new_empty(states, **float32) if return_final_states else None
    return out, y, rstd, states


def _convolve(conv_in, inputs, sizes, silu):
    """The convolution's output, a tensor that must outlive its views x, B and C, which come with it."""
    conv_out = inputs.zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.channels))
    xBC, x, B, C = _cut_xBC(conv_out, sizes)
    weight, bias, seq_idx = inputs.conv1d_weight, inputs.conv1d_bias, inputs.seq_idx
    causal_conv1d.launch_forward(sizes.conv1d, conv_in, weight, bias, seq_idx, None, silu, xBC, None)
    return conv_out, x, B, C


def _forward(*arguments):
    inputs, options, (return_final_states, keep) = _named(arguments)
    sizes = _check(inputs, options)
    results = out, y, rstd, final_states = _allocate(inputs, sizes, return_final_states, keep)
    inputs, row_stride = _kernel_layout(inputs)
    zxbcdt, _, _, dt_bias, A, D, initial_states, seq_idx, rmsnorm_weight = inputs
    if sizes.d_mlp:
        swiglu._forward(_mlp(zxbcdt, sizes), out=out.narrow(2, 0, sizes.d_mlp))
    if sizes.empty:
        if return_final_states:
            final_states.zero_() if initial_states is None else final_states.copy_(initial_states)
        return results
    z, conv_in, dt = _cut(zxbcdt, row_stride, sizes)
    conv_out, x, B, C = _convolve(conv_in, inputs, sizes, options.silu)
    gated = _heads(out, sizes, sizes.d_mlp)
    norm = rmsnorm_weight is not None
    if norm and y is None:
        y = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
    scan = x, dt, A, B, C, D, None if norm else z, dt_bias, initial_states, seq_idx
    scan_options = True, options.dt_min, options.dt_max, options.A_is_log
    ssd.launch_forward(sizes.scan, scan, scan_options, _heads(y, sizes) if norm else gated, final_states)
    if norm:
        norm_inputs = (y, sizes.dim), rmsnorm_weight, None, (z, row_stride), options.rmsnorm_eps
        norm_options = sizes.dim // sizes.ngroups, options.norm_before_gate, True
        gated = gated, sizes.d_mlp + sizes.dim
        gated_norm.launch_forward(sizes.batch * sizes.seqlen, *norm_inputs, *norm_options, gated, None, rstd)
    del conv_out  # held until here: the kernels have it now
    return results


def _forward_fake(*arguments):
    inputs, options, (return_final_states, keep) = _named(arguments)
    return _allocate(inputs, _check(inputs, options), return_final_states, keep)


class _SplitConv1dScan(torch.autograd.Function):
    """Keeps the inputs, of which zxbcdt is the large one, and with a norm the scan's output and 1 / rms of each group.

    Backward convolves again; without a norm it also scans again, for the output before the gate.
    """

    @staticmethod
    def forward(ctx, *arguments):
        inputs, options, (return_final_states, keep) = _named(arguments)
        out, y, rstd, states = call_below_autograd(
            split_conv1d_scan_op, *inputs, *options, return_final_states, inputs.rmsnorm_weight is not None
        )
        ctx.save_for_backward(y, rstd, *inputs)
        ctx.options = options
        ctx.out_shape = out.shape
        ctx.set_materialize_grads(False)
        if not keep:
            return out, None, None, states
        if y is not None:
            ctx.mark_non_differentiable(y, rstd)
        return out, y, rstd, states

    @staticmethod
    def backward(ctx, dout, dy, drstd, dfinal_states):
        tensors = ctx.saved_tensors
        if dout is None and dfinal_states is None:
            return (None,) * 19
        if dout is None:  # out itself was not used
            dout = tensors[2].new_zeros(ctx.out_shape)
        need_dinitial_states = ctx.needs_input_grad[6]
        dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, drmsnorm_weight, _ = call_in_backward(
            split_conv1d_scan_backward_op, dout, dfinal_states, *tensors, *ctx.options, need_dinitial_states, False
        )
        grads = dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, None, drmsnorm_weight
        return *grads, *(None,) * 10


_ARGUMENTS = (
    "Tensor zxbcdt, Tensor conv1d_weight, Tensor? conv1d_bias, Tensor? dt_bias, Tensor A, Tensor? D, "
    "Tensor? initial_states, Tensor? seq_idx, Tensor? rmsnorm_weight, "
    "int headdim, int ngroups, float dt_min, float dt_max, bool silu, float rmsnorm_eps, bool norm_before_gate, "
    "bool A_is_log"
)

split_conv1d_scan_op = define(
    f"split_conv1d_scan({_ARGUMENTS}, bool return_final_states, bool keep) "
    "-> (Tensor out, Tensor y, Tensor rstd, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_SplitConv1dScan,
)


# ---- backward operator -----------------------------------------------------------------------------------------------


def _allocate_grads(inputs, sizes, need_dinitial_states):
    """Gradients without values: of dt_bias, A, D, initial_states and rmsnorm_weight."""
    _, _, _, dt_bias, A, D, _, _, rmsnorm_weight = inputs
    states = (sizes.batch, sizes.nheads, sizes.headdim, sizes.dstate)
    heads, float32 = (sizes.nheads,), {"dtype": torch.float32}
    return (
        None if dt_bias is None else A.new_empty(heads, **float32),
        A.new_empty(heads, **float32),
        None if D is None else empty_like(D),
        A.new_empty(states, **float32) if need_dinitial_states else None,
        None if rmsnorm_weight is None else empty_like(rmsnorm_weight),
    )


def _backward(dout, dfinal_states, y, rstd, *arguments):
    inputs, options, (need_dinitial_states, recompute_out) = _named(arguments)
    sizes = _check(inputs, options)
    _check_backward(sizes, dout, dfinal_states, inputs.zxbcdt, y, rstd)
    grads = ddt_bias, dA, dD, dinitial_states, drmsnorm_weight = _allocate_grads(inputs, sizes, need_dinitial_states)
    inputs, row_stride = _kernel_layout(inputs)
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx, rmsnorm_weight = inputs
    dzxbcdt = empty_like(zxbcdt)
    dout, dout_stride = in_rows(dout)
    out = empty_like(dout) if recompute_out else None
    if sizes.d_mlp:
        left, dleft = (None if t is None else t.narrow(2, 0, sizes.d_mlp) for t in (out, dout))
        swiglu._backward(dleft, _mlp(zxbcdt, sizes), recompute_out, _mlp(dzxbcdt, sizes), left)
    if sizes.empty:
        return _grads_of_nothing(inputs, sizes, dfinal_states, dzxbcdt, grads, out)

    z, conv_in, dt = _cut(zxbcdt, row_stride, sizes)
    dz, dconv_in, ddt = _cut(dzxbcdt, zxbcdt.shape[2], sizes)
    conv_out, x, B, C = _convolve(conv_in, inputs, sizes, options.silu)
    scan = x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx
    scan_options = True, options.dt_min, options.dt_max, options.A_is_log
    if rmsnorm_weight is not None:
        rows, row = sizes.batch * sizes.seqlen, sizes.dim
        norm_inputs = (y.contiguous(), row), rmsnorm_weight, None, (z, row_stride)
        norm_options = sizes.dim // sizes.ngroups, options.norm_before_gate, True
        if recompute_out:
            gated = _heads(out, sizes, sizes.d_mlp), out.shape[2]
            gated_norm.launch_forward(rows, *norm_inputs, options.rmsnorm_eps, *norm_options, gated, None, None)
        dgated = View(dout, sizes.d_mlp), dout_stride
        dy = empty_like(y)
        norm_grads = (dy, row), drmsnorm_weight, None, (dz, zxbcdt.shape[2])
        gated_norm.launch_backward(rows, dgated, *norm_inputs, None, rstd.contiguous(), *norm_options, *norm_grads)
        del norm_inputs, norm_grads
    else:
        y = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
        ssd.launch_forward(sizes.scan, scan, scan_options, _heads(y, sizes), None)
        gated, dgated = (None if t is None else t.narrow(2, sizes.d_mlp, sizes.dim) for t in (out, dout))
        z, dz = (tensor.narrow(2, 2 * sizes.d_mlp, sizes.dim) for tensor in (zxbcdt, dzxbcdt))
        dy = _gate_backward(dgated, y, z, dz, gated).contiguous()
    del y
    dconv_out = empty_like(conv_out)
    dxBC, dx, dB, dC = _cut_xBC(dconv_out, sizes)
    dfinal_states = checks.contiguous(dfinal_states)
    scan_grads = dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_states
    ssd_backward.launch_backward(sizes.scan, _heads(dy, sizes), dfinal_states, scan, scan_options, scan_grads)
    del dy, conv_out  # held until here: the kernels have them now
    conv_inputs = conv_in, conv1d_weight, conv1d_bias, seq_idx, None
    dweight, dbias = causal_conv1d.launch_backward(sizes.conv1d, dxBC, None, *conv_inputs, options.silu, dconv_in, None)
    del dconv_out  # as above
    return dzxbcdt, dweight, dbias, *grads, out


def _grads_of_nothing(inputs, sizes, dfinal_states, dzxbcdt, grads, out):
    """What backward returns where there is no step, or no head beside the gated MLP."""
    dinitial_states = grads[3]
    dzxbcdt.narrow(2, 2 * sizes.d_mlp, dzxbcdt.shape[2] - 2 * sizes.d_mlp).zero_()
    dconv1d = (None if tensor is None else torch.zeros_like(tensor) for tensor in inputs[1:3])
    for grad in grads:
        if grad is not None:
            grad.zero_()
    if dinitial_states is not None and dfinal_states is not None:
        dinitial_states.copy_(dfinal_states)
    return dzxbcdt, *dconv1d, *grads, out


def _gate_backward(dout, y, z, dz, out):
    """For out = y silu(z): the gradient of y; writes that of z into dz, and out again into out, if it is given."""
    dtype, dout, y, z = y.dtype, dout.float(), y.float(), z.float()
    sigmoid = torch.sigmoid(z)
    silu = z * sigmoid
    dz.copy_(dout * y * (sigmoid + silu * (1 - sigmoid)))
    if out is not None:
        out.copy_(y * silu)
    return (dout * silu).to(dtype)


def _check_backward(sizes, dout, dfinal_states, zxbcdt, y, rstd):
    name = "split_conv1d_scan_backward"
    batch, seqlen, dim = sizes.batch, sizes.seqlen, sizes.dim
    shape = (batch, seqlen, sizes.d_mlp + dim)
    checks.check_same(name, "dout", dout, shape, zxbcdt, "zxbcdt", "(B, L, d_mlp + H P)")
    if dfinal_states is not None:
        shape = (batch, sizes.nheads, sizes.headdim, sizes.dstate)
        checks.check_float32(name, "dfinal_states", dfinal_states, shape, zxbcdt, "zxbcdt", "(B, H, P, N)")
    if y is not None:
        checks.check_same(name, "y", y, (batch, seqlen, dim), zxbcdt, "zxbcdt", "(B, L, H P)")
        checks.check_float32(name, "rstd", rstd, (batch, seqlen, sizes.ngroups), zxbcdt, "zxbcdt", "(B, L, G)")


def _backward_fake(dout, dfinal_states, y, rstd, *arguments):
    inputs, options, (need_dinitial_states, recompute_out) = _named(arguments)
    sizes = _check(inputs, options)
    _check_backward(sizes, dout, dfinal_states, inputs.zxbcdt, y, rstd)
    large = (None if tensor is None else empty_like(tensor) for tensor in inputs[:3])
    grads = _allocate_grads(inputs, sizes, need_dinitial_states)
    return *large, *grads, empty_like(dout) if recompute_out else None


split_conv1d_scan_backward_op = define(
    "split_conv1d_scan_backward(Tensor dout, Tensor? dfinal_states, Tensor? y, Tensor? rstd, "
    f"{_ARGUMENTS}, bool need_dinitial_states, bool recompute_out) "
    "-> (Tensor dzxbcdt, Tensor dconv1d_weight, Tensor dconv1d_bias, Tensor ddt_bias, Tensor dA, Tensor dD, "
    "Tensor dinitial_states, Tensor drmsnorm_weight, Tensor out)",
    _backward,
    _backward_fake,
)
