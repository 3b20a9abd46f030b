"""LayerNorm and RMSNorm with a gate, silu(z), and groups: the norm at the end of a Mamba-2 layer."""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, pointer, run
from mamba_ssm._torch import (
    call,
    call_below_autograd,
    call_in_backward,
    define,
    make,
    no_gradients,
    reference,
    signature,
)
from mamba_ssm.ops._shared.gradients import empty_like
from mamba_ssm.ops.norm import arguments as common
from mamba_ssm.ops.norm.gated_arguments import NAME, Inputs, Options, check, fill, kernel_layout
from mamba_ssm.ops.norm.gated_backward import gated_norm_backward_op
from mamba_ssm.ops.norm.reference import gated_norm_ref


def layernorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> torch.Tensor:
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
    if reference.on:
        return gated_norm_ref(x, weight, bias, z, eps, group_size, norm_before_gate, True, is_rms_norm)
    try:
        if z is not None and z.dtype != x.dtype:
            z = checks.widen(z)  # the kernels take float32 beside any x
        width = x.shape[-1]
    except (AttributeError, RuntimeError, IndexError):  # of what is no dense tensor or has no dimension
        checks.check_tensor(NAME, "x", x)
        common.check_rows(NAME, "x", x)
        checks.check_tensor(NAME, "z", z)
        raise
    if type(eps) is not float:  # on the way of every call
        eps = checks.check_number(NAME, "eps", eps)
    group_size = width if group_size is None else checks.check_integer(NAME, "group_size", group_size)
    flags = bool(norm_before_gate), bool(is_rms_norm), False
    return call(gated_norm_op, x, weight, bias, z, eps, group_size, *flags)[0]


def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """layernorm_fn with is_rms_norm=True.

    Same as upstream's mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn.
    """
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class _GatedNorm(torch.nn.Module):
    """What the two modules share: weight (hidden_size), ones at first, and the options."""

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int | None,
        norm_before_gate: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class LayerNorm(_GatedNorm):
    """layernorm_fn with parameters weight and bias (hidden_size)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """norm(x) * silu(z), or norm(x * silu(z)) with norm_before_gate=False."""
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class RMSNorm(_GatedNorm):
    """rmsnorm_fn with parameter weight (hidden_size); there is no bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """norm(x) * silu(z), or norm(x * silu(z)) with norm_before_gate=False."""
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


# ---- operator --------------------------------------------------------------------------------------------------------


def _cut(x, weight, bias, z, eps, *options):
    """The operator's arguments as records; only this direction takes eps and want_statistics."""
    *options, want_statistics = options
    return make(Inputs, (x, weight, bias, z)), eps, make(Options, options), want_statistics


def _forward(*arguments):
    inputs, eps, options, want_statistics = _cut(*arguments)
    groups, x = check(NAME, inputs, options), inputs.x
    out = empty_like(x)
    kept = common.allocate_statistics(x, groups, options.is_rms_norm, want_statistics)
    if out.numel():
        width = x.shape[-1]
        launch_forward(out.numel() // width, kernel_layout(inputs), eps, options, (out, width), kept)
    return out, *kept


def launch_forward(rows, inputs, eps, options, out, kept):
    """Runs the kernel. x and z of inputs, and out: (tensor or View, stride of its rows); parameters contiguous. kept:
    mean and rstd, to be written; None where they are not wanted.
    """
    params = abi.MambaNorm()
    functions = place(params, inputs.weight)
    fill(params, rows, inputs, options)
    params.eps = eps
    out, params.out_row_stride = out
    params.out = out.data_ptr()
    mean, rstd = kept
    params.mean = pointer(mean)
    params.rstd = pointer(rstd)
    run(functions, "norm_forward", params)


def _forward_fake(*arguments):
    inputs, _, options, want_statistics = _cut(*arguments)
    groups = check(NAME, inputs, options)
    statistics = common.allocate_statistics(inputs.x, groups, options.is_rms_norm, want_statistics)
    return empty_like(inputs.x), *statistics


class _GatedNormFunction(torch.autograd.Function):
    """Saves the inputs, and mean and rstd of each group."""

    @staticmethod
    def forward(ctx, x, weight, bias, z, eps, *options):
        ctx.options = options[:-1]
        out, mean, rstd = call_below_autograd(gated_norm_op, x, weight, bias, z, eps, *ctx.options, True)
        ctx.save_for_backward(x, weight, bias, z, mean, rstd)
        ctx.mark_non_differentiable(*(statistic for statistic in (mean, rstd) if statistic is not None))
        ctx.set_materialize_grads(False)
        return out, mean, rstd

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return *no_gradients(Inputs, Options), None, None
        grads = call_in_backward(gated_norm_backward_op, dout, *ctx.saved_tensors, *ctx.options)
        return *grads, *no_gradients(Options), None, None


gated_norm_op = define(
    f"gated_norm({signature(Inputs)}, float eps, {signature(Options)}, bool want_statistics) "
    "-> (Tensor out, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
    autograd=_GatedNormFunction,
    called=NAME,
    planned=(),
)
