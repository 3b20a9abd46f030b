"""Convolution, scan, gate and norm of a Mamba-2 block as one operator, which writes the parts of a tensor in place.

The input projection's output zxbcdt is cut, not copied, and its gradient is one tensor that each kernel writes its part
of. On CUDA a NaN reaches all of its tile of up to 64 steps, as in mamba_ssm.ops.ssd.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm.ops import _checks as checks
from mamba_ssm.ops import _ssd_common, activations, causal_conv1d, gated_norm, ssd, ssd_backward
from mamba_ssm.ops._library import call_below_autograd, call_in_backward, define

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


def _named(arguments):
    """Inputs, options, and the arguments behind them."""
    return Inputs(*arguments[:9]), Options(*arguments[9:16]), arguments[16:]


class _Sizes(typing.NamedTuple):
    batch: int
    seqlen: int
    d_mlp: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int

    @property
    def dim(self):
        """Channels of the scan."""
        return self.nheads * self.headdim

    @property
    def matrix(self):
        """Channels of B, and of C."""
        return self.ngroups * self.dstate


def _check(inputs, options):
    """The sizes; what the parts' operators check themselves is left to them."""
    zxbcdt, conv1d_weight, A, rmsnorm_weight = inputs.zxbcdt, inputs.conv1d_weight, inputs.A, inputs.rmsnorm_weight
    headdim, ngroups = options.headdim, options.ngroups
    checks.check_dims(_NAME, "zxbcdt", zxbcdt, 3, "(B, L, 2 d_mlp + 2 H P + 2 G N + H)")
    checks.check_activation_dtype(_NAME, "zxbcdt", zxbcdt)
    checks.check_dims(_NAME, "A", A, 1, "(H,)")
    checks.check_dims(_NAME, "conv1d_weight", conv1d_weight, 2, "(H P + 2 G N, W)")
    batch, seqlen, width = zxbcdt.shape
    nheads, channels = A.shape[0], conv1d_weight.shape[0]
    dim = nheads * headdim
    checks.check_groups(_NAME, f"nheads ({nheads})", nheads, ngroups)
    dstate = (channels - dim) // (2 * ngroups)  # not divmod: sizes may be symbols
    if headdim < 1 or dstate < 1 or channels != dim + 2 * ngroups * dstate:
        raise ValueError(
            f"{_NAME}: conv1d_weight must have H P + 2 G N rows with H = {nheads}, P = {headdim}, G = {ngroups}, "
            f"got {channels}"
        )
    d_mlp = (width - dim - channels - nheads) // 2
    if d_mlp < 0 or width != 2 * d_mlp + dim + channels + nheads:
        raise ValueError(
            f"{_NAME}: zxbcdt must have 2 d_mlp + 2 H P + 2 G N + H columns, {dim + channels + nheads} without d_mlp, "
            f"got {width}"
        )
    if rmsnorm_weight is not None:
        checks.check_float(_NAME, "rmsnorm_weight", rmsnorm_weight, (dim,), zxbcdt, "zxbcdt", "(H P,)")
    return _Sizes(batch, seqlen, d_mlp, nheads, headdim, ngroups, dstate)


def _split(zxbcdt, sizes):
    """The gated MLP's input (None if there is none), z (B, L, H P), xBC (B, H P + 2 G N, L), dt (B, L, H): views."""
    zxbcdt = checks.unit_last_stride(zxbcdt)
    parts = 2 * sizes.d_mlp, sizes.dim, sizes.dim + 2 * sizes.matrix, sizes.nheads
    mlp, z, xBC, dt = zxbcdt.split_with_sizes(parts, 2)
    return mlp if sizes.d_mlp else None, z, xBC.transpose(1, 2), dt


def _split_xBC(xBC, sizes):
    """Views of (B, H P + 2 G N, L): x (B, L, H, P), B and C (B, L, G, N)."""
    x, B, C = xBC.transpose(1, 2).split_with_sizes((sizes.dim, sizes.matrix, sizes.matrix), 2)
    heads = sizes.batch, sizes.seqlen, sizes.nheads, sizes.headdim
    groups = sizes.batch, sizes.seqlen, sizes.ngroups, sizes.dstate
    return x.view(heads), B.view(groups), C.view(groups)


# ---- forward operator ------------------------------------------------------------------------------------------------


def _forward(*arguments):
    inputs, options, (return_final_states, keep) = _named(arguments)
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx, rmsnorm_weight = inputs
    sizes = _check(inputs, options)
    mlp, z, xBC, dt = _split(zxbcdt, sizes)
    norm = rmsnorm_weight is not None
    out = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.d_mlp + sizes.dim))
    if mlp is None:
        gated = out
    else:
        left, gated = out.split_with_sizes((sizes.d_mlp, sizes.dim), 2)
        activations._forward(mlp, out=left)
    xBC, _ = causal_conv1d._forward(xBC, conv1d_weight, conv1d_bias, seq_idx, None, False, options.silu)
    x, B, C = _split_xBC(xBC, sizes)
    y, final_states = ssd._forward(
        x, dt, A, B, C, D, None if norm else z.view(x.shape), dt_bias, initial_states, seq_idx,
        True, options.dt_min, options.dt_max, return_final_states, out=None if norm else gated.view(x.shape),
    )  # fmt: skip
    if not norm:
        return out, None, None, final_states
    y = y.view(z.shape)
    norm_options = options.rmsnorm_eps, sizes.dim // sizes.ngroups, options.norm_before_gate, True
    _, _, rstd = gated_norm._forward(y, rmsnorm_weight, None, z, *norm_options, keep, out=gated)
    return (out, y, rstd, final_states) if keep else (out, None, None, final_states)


def _forward_fake(*arguments):
    inputs, options, (return_final_states, keep) = _named(arguments)
    sizes = _check_all(inputs, options)
    zxbcdt, A = inputs.zxbcdt, inputs.A
    out = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.d_mlp + sizes.dim))
    y = rstd = states = None
    if inputs.rmsnorm_weight is not None and keep:
        y = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
        rstd = A.new_empty((sizes.batch, sizes.seqlen, sizes.ngroups))
    if return_final_states:
        states = A.new_empty((sizes.batch, sizes.nheads, sizes.headdim, sizes.dstate))
    return out, y, rstd, states


def _check_all(inputs, options):
    """The checks of this operator and of its parts, for tensors without values."""
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx, _ = inputs
    sizes = _check(inputs, options)
    _, _, xBC, dt = _split(zxbcdt, sizes)
    causal_conv1d._check(xBC, conv1d_weight, conv1d_bias, seq_idx, None)
    x, B, C = _split_xBC(torch.empty_like(xBC, memory_format=torch.contiguous_format), sizes)
    _ssd_common.check(x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, options.dt_min, options.dt_max)
    return sizes


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
            return (None,) * 18
        if dout is None:  # out itself was not used
            dout = tensors[2].new_zeros(ctx.out_shape)
        need_dinitial_states = ctx.needs_input_grad[6]
        dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, drmsnorm_weight, _ = call_in_backward(
            split_conv1d_scan_backward_op, dout, dfinal_states, *tensors, *ctx.options, need_dinitial_states, False
        )
        grads = dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, None, drmsnorm_weight
        return *grads, *(None,) * 9


_ARGUMENTS = (
    "Tensor zxbcdt, Tensor conv1d_weight, Tensor? conv1d_bias, Tensor? dt_bias, Tensor A, Tensor? D, "
    "Tensor? initial_states, Tensor? seq_idx, Tensor? rmsnorm_weight, "
    "int headdim, int ngroups, float dt_min, float dt_max, bool silu, float rmsnorm_eps, bool norm_before_gate"
)

split_conv1d_scan_op = define(
    f"split_conv1d_scan({_ARGUMENTS}, bool return_final_states, bool keep) "
    "-> (Tensor out, Tensor y, Tensor rstd, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_SplitConv1dScan,
)


# ---- backward operator -----------------------------------------------------------------------------------------------


def _backward(dout, dfinal_states, y, rstd, *arguments):
    inputs, options, (need_dinitial_states, recompute_out) = _named(arguments)
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx, rmsnorm_weight = inputs
    sizes = _check(inputs, options)
    _check_backward(sizes, dout, dfinal_states, zxbcdt, y, rstd)
    dzxbcdt = torch.empty_like(zxbcdt, memory_format=torch.contiguous_format)
    mlp, z, conv_in, dt = _split(zxbcdt, sizes)
    dmlp, dz, dconv_in, ddt = _split(dzxbcdt, sizes)
    gated = out = dout.new_empty(dout.shape) if recompute_out else None
    if mlp is not None:
        left = None
        dleft, dout = dout.split_with_sizes((sizes.d_mlp, sizes.dim), 2)
        if recompute_out:
            left, gated = out.split_with_sizes((sizes.d_mlp, sizes.dim), 2)
        activations._backward(dleft, mlp, recompute_out, dmlp, left)

    conv_out, _ = causal_conv1d._forward(conv_in, conv1d_weight, conv1d_bias, seq_idx, None, False, options.silu)
    x, B, C = _split_xBC(conv_out, sizes)
    drmsnorm_weight = None
    if rmsnorm_weight is not None:
        norm = sizes.dim // sizes.ngroups, options.norm_before_gate, True
        if recompute_out:
            gated_norm._forward(y, rmsnorm_weight, None, z, options.rmsnorm_eps, *norm, False, out=gated)
        dy, drmsnorm_weight, _, _ = gated_norm._backward(dout, y, rmsnorm_weight, None, z, None, rstd, *norm, dz=dz)
    else:
        scan = x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx
        y, _ = ssd._forward(*scan, True, options.dt_min, options.dt_max, False)
        dy = _gate_backward(dout, y.view(z.shape), z, dz, gated)
    del y
    dconv_out = zxbcdt.new_empty((sizes.batch, sizes.seqlen, conv_in.shape[1])).transpose(1, 2)
    dx, dB, dC = _split_xBC(dconv_out, sizes)
    _, _, dA, _, _, dD, ddt_bias, dinitial_states = ssd_backward._backward(
        dy.view(x.shape), dfinal_states, x, dt, A, B, C, D, dt_bias, initial_states, seq_idx,
        True, options.dt_min, options.dt_max, need_dinitial_states, into=(dx, ddt, dB, dC),
    )  # fmt: skip
    del dy, conv_out, x, B, C
    _, dweight, dbias, _ = causal_conv1d._backward(
        dconv_out, None, conv_in, conv1d_weight, conv1d_bias, seq_idx, None, False, options.silu, dx=dconv_in
    )
    return dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, drmsnorm_weight, out


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
    batch, seqlen, d_mlp, nheads, headdim, ngroups, dstate = sizes
    name = "split_conv1d_scan_backward"
    shape = (batch, seqlen, d_mlp + sizes.dim)
    checks.check_same(name, "dout", dout, shape, zxbcdt, "zxbcdt", "(B, L, d_mlp + H P)")
    if dfinal_states is not None:
        shape = (batch, nheads, headdim, dstate)
        checks.check_float32(name, "dfinal_states", dfinal_states, shape, zxbcdt, "zxbcdt", "(B, H, P, N)")
    if y is not None:
        checks.check_same(name, "y", y, (batch, seqlen, sizes.dim), zxbcdt, "zxbcdt", "(B, L, H P)")
        checks.check_float32(name, "rstd", rstd, (batch, seqlen, ngroups), zxbcdt, "zxbcdt", "(B, L, G)")


def _backward_fake(dout, dfinal_states, y, rstd, *arguments):
    inputs, options, (need_dinitial_states, recompute_out) = _named(arguments)
    sizes = _check_all(inputs, options)
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, _, _, rmsnorm_weight = inputs
    _check_backward(sizes, dout, dfinal_states, zxbcdt, y, rstd)
    grads = (
        None if tensor is None else tensor.new_empty(tensor.shape)
        for tensor in (zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)
    )
    states = A.new_empty((sizes.batch, sizes.nheads, sizes.headdim, sizes.dstate)) if need_dinitial_states else None
    drmsnorm_weight = None if rmsnorm_weight is None else rmsnorm_weight.new_empty(rmsnorm_weight.shape)
    return *grads, states, drmsnorm_weight, dout.new_empty(dout.shape) if recompute_out else None


split_conv1d_scan_backward_op = define(
    "split_conv1d_scan_backward(Tensor dout, Tensor? dfinal_states, Tensor? y, Tensor? rstd, "
    f"{_ARGUMENTS}, bool need_dinitial_states, bool recompute_out) "
    "-> (Tensor dzxbcdt, Tensor dconv1d_weight, Tensor dconv1d_bias, Tensor ddt_bias, Tensor dA, Tensor dD, "
    "Tensor dinitial_states, Tensor drmsnorm_weight, Tensor out)",
    _backward,
    _backward_fake,
)
