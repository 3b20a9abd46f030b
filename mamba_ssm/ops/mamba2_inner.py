"""The inside of a Mamba-2 block as one memory-saving autograd node: convolution, scan, gate, norm and out_proj.

The output projection is a plain torch matrix product, so that compilers see it; what comes before it is one operator,
mamba_ssm.ops.split_conv1d_scan. Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import torch
import torch.nn.functional as F

from mamba_ssm.ops import _checks as checks
from mamba_ssm.ops._autocast import autocast_dtype, no_autocast
from mamba_ssm.ops._conv1d_common import wants_silu
from mamba_ssm.ops._library import call, call_below_autograd, call_in_backward, wants_one_node
from mamba_ssm.ops.split_conv1d_scan import Inputs, Options, split_conv1d_scan_backward_op, split_conv1d_scan_op
from mamba_ssm.ops.ssd import check_options

_NAME = "mamba_split_conv1d_scan_combined"


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
    state_dtype=None,
):
    """A Mamba-2 block between its input projection and its residual.

    Args:
        zxbcdt: (B, L, 2 d_mlp + 2 H P + 2 G N + H) float32, float16 or bfloat16: gate and input of the gated MLP (d_mlp
            channels, usually none), z, and x, B, C and dt of the scan.
        conv1d_weight: (H P + 2 G N, W), W 2..4; conv1d_bias: (H P + 2 G N) or None; of any of these dtypes.
        dt_bias, A: (H); D: (H), or (H, P), or None; float32, or widened to it. dt = softplus(dt + dt_bias).
        chunk_size: a positive integer, upstream's tile size. It has no effect: the kernels choose their own.
        initial_states: (B, H, P, N) float32, the states before the first step; zero if None.
        seq_idx: (B, L) int32; convolution and states restart at each step whose value differs from the step before.
        dt_limit: (smallest, largest) value of dt, which is then clamped.
        activation: of the convolution: "silu", "swish" or None.
        rmsnorm_weight: (H P) of any of these dtypes: RMSNorm over groups of H P / G channels, with rmsnorm_eps,
            before (norm_before_gate) or after the gate silu(z). None: only the gate.
        outproj_weight: (d_model, d_mlp + H P) and outproj_bias: (d_model); None to return before the projection.
        headdim: P; may be None if D is (H, P). ngroups: G.
        state_dtype: dtype of the returned states, float32 if None.

    Returns:
        out (B, L, d_model), or (B, L, d_mlp + H P) without outproj_weight, of zxbcdt's dtype; with return_final_states
        (out, final_states (B, H, P, N)). Under autocast zxbcdt and the projection are cast to autocast's dtype.
        A NaN of zxbcdt stays in its row of out and, on the CPU, behind its step; on CUDA it may reach all of its tile
        of up to 64 steps.

    Differentiable once in every floating-point argument. Kept for backward are the arguments, and with rmsnorm_weight
    the scan's output (B, L, H P) in zxbcdt's dtype and 1 / rms (B, L, G) float32; the rest is computed again.

    Same as upstream's mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined.
    """
    check_options(_NAME, chunk_size, dt_limit, state_dtype)
    if not isinstance(ngroups, int):
        raise TypeError(f"{_NAME}: ngroups must be an integer, got {ngroups!r}")
    checks.check_tensor(_NAME, "zxbcdt", zxbcdt)
    dtype = autocast_dtype(zxbcdt)
    if dtype is not None:
        zxbcdt = checks.cast(zxbcdt, dtype)
        outproj_weight = checks.cast(outproj_weight, dtype)
    if outproj_bias is not None:
        outproj_bias = checks.cast(outproj_bias, zxbcdt.dtype)
    inputs = Inputs(
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        checks.widen(dt_bias),
        checks.widen(A),
        checks.widen(D),
        checks.widen(initial_states),
        seq_idx,
        rmsnorm_weight,
    )
    options = Options(
        _headdim(D, headdim),
        ngroups,
        float(dt_limit[0]),
        float(dt_limit[1]),
        wants_silu(_NAME, activation),
        float(rmsnorm_eps),
        bool(norm_before_gate),
    )
    return_final_states = bool(return_final_states)
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError(f"{_NAME}: outproj_bias is given, but outproj_weight is None")
    if outproj_weight is not None and wants_one_node((*inputs, outproj_weight, outproj_bias)):
        result = _Mamba2Inner.apply(outproj_weight, outproj_bias, *inputs, *options, return_final_states)
        out, states = result if return_final_states else (result, None)
    else:
        out, _, _, states = call(split_conv1d_scan_op, *inputs, *options, return_final_states, False)
        if outproj_weight is not None:
            out = _project(out, outproj_weight, outproj_bias)
    if not return_final_states:
        return out
    return out, states if state_dtype is None else states.to(state_dtype)


def _headdim(D, headdim):
    if isinstance(D, torch.Tensor) and D.dim() == 2:
        if headdim not in (None, D.shape[1]):
            raise ValueError(f"{_NAME}: headdim is {headdim}, but D has shape (H, P) = {tuple(D.shape)}")
        return D.shape[1]
    if not isinstance(headdim, int):
        raise ValueError(f"{_NAME}: headdim must be given where D is not (H, P), got {headdim!r}")
    return headdim


def _project(out, weight, bias):
    checks.check_dims(_NAME, "outproj_weight", weight, 2, "(d_model, d_mlp + H P)")
    shape = (weight.shape[0], out.shape[-1])
    checks.check_same(_NAME, "outproj_weight", weight, shape, out, "zxbcdt", "(d_model, d_mlp + H P)")
    if bias is not None:
        checks.check_tensor(_NAME, "outproj_bias", bias)
        checks.check_same(_NAME, "outproj_bias", bias, shape[:1], out, "zxbcdt", "(d_model,)")
    return F.linear(out, weight, bias)


class _Mamba2Inner(torch.autograd.Function):
    """split_conv1d_scan and the output projection; keeps what the operator alone would, not the projection's input."""

    @staticmethod
    def forward(ctx, outproj_weight, outproj_bias, *arguments):
        out, y, rstd, states = call_below_autograd(split_conv1d_scan_op, *arguments, True)
        ctx.save_for_backward(outproj_weight, y, rstd, *arguments[:9])
        ctx.options = arguments[9:16]
        ctx.set_materialize_grads(False)
        with no_autocast(out):
            out = _project(out, outproj_weight, outproj_bias)
        return out if states is None else (out, states)  # the compiler of torch 2.4 fails at a None

    @staticmethod
    def backward(ctx, dout, dstates=None):
        outproj_weight, *tensors = ctx.saved_tensors
        if dout is None and dstates is None:
            return (None,) * 19
        if dout is None:  # out itself was not used
            dout = dstates.new_zeros((*tensors[2].shape[:2], outproj_weight.shape[0]), dtype=outproj_weight.dtype)
        dout = dout.contiguous()
        need = ctx.needs_input_grad
        with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
            dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, drmsnorm_weight, out = call_in_backward(
                split_conv1d_scan_backward_op, dout @ outproj_weight, dstates, *tensors, *ctx.options, need[8], need[0]
            )
            count = dout.shape[0] * dout.shape[1]
            rows = dout.reshape(count, dout.shape[2])
            doutproj_weight = rows.t() @ out.reshape(count, out.shape[2]) if need[0] else None
            doutproj_bias = rows.sum(0) if need[1] else None
        grads = dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, None, drmsnorm_weight
        return doutproj_weight, doutproj_bias, *grads, *(None,) * 8
