"""SwiGLU and softplus."""

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import DTYPE_CODES, place, run
from mamba_ssm._torch import call, call_below_autograd, call_in_backward, define, reference
from mamba_ssm.ops.norm import arguments as common
from mamba_ssm.ops.norm.reference import swiglu_ref

_NAME = "swiglu"


def swiglu(xy: torch.Tensor, gate_last: bool = False) -> torch.Tensor:
    """silu(x) * y, where x and y are the halves of xy's last dimension.

    Args:
        xy: (..., 2 N) float32, float16 or bfloat16.
        gate_last: the halves are y and x.

    Returns:
        (..., N) of xy's dtype.

    Raises:
        TypeError: the dtype is wrong. ValueError: the last dimension is odd.

    Same as upstream's mamba_ssm.ops.triton.k_activations.swiglu.
    """
    return swiglu_ref(xy, gate_last) if reference.on else call(swiglu_op, xy, bool(gate_last))


def softplus(dt: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(dt)), and dt itself above 20, as torch.nn.functional.softplus; of dt's shape and dtype.

    Upstream's mamba_ssm.ops.triton.softplus.softplus is the same function for use inside triton kernels.
    """
    return F.softplus(dt)


def swiglu_forward(xy: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """swiglu without gradients, into out (like the result) if it is given. Upstream's _swiglu_fwd."""
    with torch.no_grad():
        result = swiglu(xy)
        return checks.into(_NAME, "out", out, result)


def swiglu_backward(
    xy: torch.Tensor,
    dout: torch.Tensor,
    dxy: torch.Tensor | None = None,
    recompute_output: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The gradient of xy for dout (..., N), into dxy (like xy) if it is given.

    Returns dxy; with recompute_output (dxy, swiglu(xy)), the latter in out if it is given. Upstream's _swiglu_bwd.
    """
    with torch.no_grad():
        gradient, result = call(swiglu_backward_op, dout, xy, bool(recompute_output), False)
        dxy = checks.into(_NAME, "dxy", dxy, gradient)
        if not recompute_output:
            return dxy
        return dxy, checks.into(_NAME, "out", out, result)


# ---- operators -------------------------------------------------------------------------------------------------------


def _check(xy):
    """Returns the shape of a half."""
    common.check_rows(_NAME, "xy", xy)
    if xy.shape[-1] % 2:
        raise ValueError(f"{_NAME}: the last dimension of xy must be even, x and y side by side, got {xy.shape[-1]}")
    return *xy.shape[:-1], xy.shape[-1] // 2


def _fill(params, xy, gate_last):
    """Sizes and xy; returns xy as the kernels read it."""
    params.gate_last = gate_last
    params.rows = xy.numel() // xy.shape[-1]
    params.width = xy.shape[-1] // 2
    params.dtype = DTYPE_CODES[xy.dtype]
    xy, params.xy_row_stride = common.in_rows(xy)
    params.xy = xy.data_ptr()
    return xy


def _forward(xy, gate_last):
    out = xy.new_empty(_check(xy))
    launch_forward(xy, out, gate_last)
    return out


def _forward_fake(xy, gate_last):
    return xy.new_empty(_check(xy))


def launch_forward(xy, out, gate_last=False):
    """Runs the kernel. out may be cut out of a larger contiguous tensor."""
    if out.numel() == 0:
        return
    params = abi.MambaSwiglu()
    functions = place(params, xy)
    xy = _fill(params, xy, gate_last)
    params.out = out.data_ptr()
    _, params.out_row_stride = common.in_rows(out)
    run(functions, "swiglu_forward", params)


class _Swiglu(torch.autograd.Function):
    """Saves xy."""

    @staticmethod
    def forward(ctx, xy, gate_last):
        ctx.save_for_backward(xy)
        ctx.gate_last = gate_last
        return call_below_autograd(swiglu_op, xy, gate_last)

    @staticmethod
    def backward(ctx, dout):
        return call_in_backward(swiglu_backward_op, dout, *ctx.saved_tensors, False, ctx.gate_last)[0], None


swiglu_op = define(
    "swiglu(Tensor xy, bool gate_last=False) -> Tensor", _forward, _forward_fake, autograd=_Swiglu, planned=()
)


def _allocate_backward(dout, xy, want_out, gate_last):
    shape = _check(xy)
    checks.check_same(_NAME + "_backward", "dout", dout, shape, xy, "xy", "(..., N)")
    dxy = torch.empty_like(xy, memory_format=torch.contiguous_format)
    return dxy, xy.new_empty(shape) if want_out else None


def _backward(dout, xy, want_out, gate_last):
    dxy, out = _allocate_backward(dout, xy, want_out, gate_last)
    launch_backward(dout, xy, dxy, out, gate_last)
    return dxy, out


def launch_backward(dout, xy, dxy, out, gate_last=False):
    """Runs the kernel. dxy and out (None: not wanted) may be cut out of larger contiguous tensors."""
    if dout.numel() == 0:
        return
    params = abi.MambaSwiglu()
    functions = place(params, xy)
    xy = _fill(params, xy, gate_last)
    dout, params.dout_row_stride = common.in_rows(dout)
    params.dout = dout.data_ptr()
    params.dxy = dxy.data_ptr()
    _, params.dxy_row_stride = common.in_rows(dxy)
    if out is not None:
        params.out = out.data_ptr()
        _, params.out_row_stride = common.in_rows(out)
    run(functions, "swiglu_backward", params)


swiglu_backward_op = define(
    "swiglu_backward(Tensor dout, Tensor xy, bool want_out, bool gate_last=False) -> (Tensor dxy, Tensor out)",
    _backward,
    _allocate_backward,
    planned=(),
)
