"""LayerNorm and RMSNorm with a gate, silu(z), and groups: the norm at the end of a Mamba-2 layer."""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import call, call_below_autograd, call_in_backward, define
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.norm import arguments as common

_NAME = "layernorm_gated"


def layernorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=False):
    """LayerNorm (or RMSNorm) over groups of neighbours in the last dimension, times silu(z).

    Args (float32, float16 or bfloat16 each):
        x: (..., N). z: like x, or None for no gate.
        weight: (N). bias: (N), or None.
        group_size: elements that are normalised together, a divisor of N; None for all N.
        norm_before_gate: norm(x) * silu(z), else norm(x * silu(z)).
        is_rms_norm: RMSNorm instead of LayerNorm.

    Returns:
        out of x's shape and dtype.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape or device is wrong.

    Same as upstream's mamba_ssm.ops.triton.layernorm_gated.layernorm_fn.
    """
    checks.check_tensor(_NAME, "x", x)
    if z is not None:
        checks.check_tensor(_NAME, "z", z)
        if z.dtype != x.dtype:
            z = checks.widen(z)  # the kernels take float32 beside any x
    common.check_rows(_NAME, "x", x)
    eps = checks.check_number(_NAME, "eps", eps)
    group_size = x.shape[-1] if group_size is None else checks.check_integer(_NAME, "group_size", group_size)
    flags = bool(norm_before_gate), bool(is_rms_norm), False
    return call(gated_norm_op, x, weight, bias, z, eps, group_size, *flags)[0]


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """layernorm_fn with is_rms_norm=True.

    Same as upstream's mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn.
    """
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class _GatedNorm(torch.nn.Module):
    """What the two modules share: weight (hidden_size), ones at first, and the options."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class LayerNorm(_GatedNorm):
    """layernorm_fn with parameters weight and bias (hidden_size)."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, x, z=None):
        """norm(x) * silu(z), or norm(x * silu(z)) with norm_before_gate=False."""
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(_GatedNorm):
    """rmsnorm_fn with parameter weight (hidden_size); there is no bias."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x, z=None):
        """norm(x) * silu(z), or norm(x * silu(z)) with norm_before_gate=False."""
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


# ---- forward operator ------------------------------------------------------------------------------------------------


def _check(op, x, weight, bias, z, group_size):
    """Raises on any argument that the kernels do not take; returns the number of groups."""
    common.check_rows(op, "x", x)
    common.check_parameters(op, x, weight, bias)
    if z is not None:
        common.check_beside(op, "z", z, x)
    width = x.shape[-1]
    if width == 0:
        return 1
    if group_size < 1 or width % group_size:
        raise ValueError(f"{op}: group_size must divide the last dimension of x, {width}, got {group_size}")
    return width // group_size


def _fill(params, rows, x, weight, bias, z, group_size, norm_before_gate, is_rms_norm):
    """Sets the fields that forward and backward share."""
    x, params.x_row_stride = x
    params.x = x.data_ptr()
    other_dtype = x.dtype
    if z is not None:
        z, params.z_row_stride = z
        params.z = z.data_ptr()
        other_dtype = z.dtype
    common.fill(params, rows, x.dtype, weight, bias, group_size, is_rms_norm, other_dtype)
    params.norm_before_gate = norm_before_gate


def _forward(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, want_statistics):
    groups = _check(_NAME, x, weight, bias, z, group_size)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, rstd = common.allocate_statistics(x, groups, is_rms_norm, want_statistics)
    if x.numel() == 0:
        return out, mean, rstd
    width = x.shape[-1]
    tensors = common.in_rows(x), weight.contiguous(), checks.contiguous(bias), None if z is None else common.in_rows(z)
    options = group_size, norm_before_gate, is_rms_norm
    launch_forward(x.numel() // width, *tensors, eps, *options, (out, width), mean, rstd)
    return out, mean, rstd


def launch_forward(rows, x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, out, mean, rstd):
    """Runs the kernel. x, z and out: (tensor or View, stride of its rows); the others contiguous."""
    params = abi.MambaNorm()
    functions = place(params, weight)
    _fill(params, rows, x, weight, bias, z, group_size, norm_before_gate, is_rms_norm)
    params.eps = eps
    out, params.out_row_stride = out
    params.out = out.data_ptr()
    params.rstd = pointer(rstd)
    params.mean = pointer(mean)
    run(functions, "norm_forward", params)


def _forward_fake(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, want_statistics):
    groups = _check(_NAME, x, weight, bias, z, group_size)
    statistics = common.allocate_statistics(x, groups, is_rms_norm, want_statistics)
    return torch.empty_like(x, memory_format=torch.contiguous_format), *statistics


class _GatedNormFunction(torch.autograd.Function):
    """Saves the inputs, and mean and rstd of each group."""

    @staticmethod
    def forward(ctx, x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, want_statistics):
        options = group_size, norm_before_gate, is_rms_norm
        out, mean, rstd = call_below_autograd(gated_norm_op, x, weight, bias, z, eps, *options, True)
        ctx.save_for_backward(x, weight, bias, z, mean, rstd)
        ctx.options = options
        ctx.mark_non_differentiable(*(statistic for statistic in (mean, rstd) if statistic is not None))
        ctx.set_materialize_grads(False)
        return out, mean, rstd

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return (None,) * 9
        arguments = dout, *ctx.saved_tensors, *ctx.options
        dx, dweight, dbias, dz = call_in_backward(gated_norm_backward_op, *arguments)
        return dx, dweight, dbias, dz, *(None,) * 5


gated_norm_op = define(
    "gated_norm(Tensor x, Tensor weight, Tensor? bias, Tensor? z, float eps, SymInt group_size, bool norm_before_gate, "
    "bool is_rms_norm, bool want_statistics) -> (Tensor out, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
    autograd=_GatedNormFunction,
    called=_NAME,
)


# ---- backward operator -----------------------------------------------------------------------------------------------


def _check_backward(dout, x, weight, bias, z, mean, rstd, group_size, is_rms_norm):
    name = _NAME + "_backward"
    groups = _check(name, x, weight, bias, z, group_size)
    checks.check_same(name, "dout", dout, x.shape, x, "x", "(..., N)")
    common.check_statistics(name, x, groups, mean, rstd, is_rms_norm)


def _allocate_grads(x, weight, bias, z):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        weight.new_empty(weight.shape),
        None if bias is None else bias.new_empty(bias.shape),
        None if z is None else torch.empty_like(z, memory_format=torch.contiguous_format),
    )


def _backward(dout, x, weight, bias, z, mean, rstd, group_size, norm_before_gate, is_rms_norm):
    _check_backward(dout, x, weight, bias, z, mean, rstd, group_size, is_rms_norm)
    dx, dweight, dbias, dz = _allocate_grads(x, weight, bias, z)
    if x.numel() == 0:
        return dx, dweight.zero_(), None if bias is None else dbias.zero_(), dz
    width = x.shape[-1]
    weight, bias, rstd, mean = weight.contiguous(), checks.contiguous(bias), rstd.contiguous(), checks.contiguous(mean)
    inputs = common.in_rows(x), weight, bias, None if z is None else common.in_rows(z), mean, rstd
    options = group_size, norm_before_gate, is_rms_norm
    grads = (dx, width), dweight, dbias, None if z is None else (dz, width)
    launch_backward(x.numel() // width, common.in_rows(dout), *inputs, *options, *grads)
    return dx, dweight, dbias, dz


def launch_backward(
    rows, dout, x, weight, bias, z, mean, rstd, group_size, norm_before_gate, is_rms_norm, dx, dweight, dbias, dz
):
    """Runs the kernels. dout, x, z, dx and dz: (tensor or View, stride of its rows); the others contiguous."""
    params = abi.MambaNormBackward()
    functions = place(params, weight)
    _fill(params, rows, x, weight, bias, z, group_size, norm_before_gate, is_rms_norm)
    dout, params.dout_row_stride = dout
    params.dout = dout.data_ptr()
    dx, params.dx_row_stride = dx
    params.dx = dx.data_ptr()
    if dz is not None:
        dz, params.dz_row_stride = dz
        params.dz = dz.data_ptr()
    workspace = common.fill_gradients(params, functions, mean, rstd, dweight, dbias)
    run(functions, "norm_backward", params)
    del workspace  # until here


def _backward_fake(dout, x, weight, bias, z, mean, rstd, group_size, norm_before_gate, is_rms_norm):
    _check_backward(dout, x, weight, bias, z, mean, rstd, group_size, is_rms_norm)
    return _allocate_grads(x, weight, bias, z)


gated_norm_backward_op = define(
    "gated_norm_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? z, Tensor? mean, Tensor rstd, "
    "SymInt group_size, bool norm_before_gate, bool is_rms_norm) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz)",
    _backward,
    _backward_fake,
)
