"""The inside of a Mamba-2 block as one memory-saving autograd node: convolution, scan, gate, norm and out_proj; and
mamba2_block, the same with in_proj in front.

The projections are plain torch matrix products, so that compilers see them; what lies between is one operator,
mamba_ssm.ops.split_conv1d_scan. Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import torch
import torch.nn.functional as F

from mamba_ssm._torch import (
    apply,
    autocast_dtype,
    call,
    call_below_autograd,
    call_in_backward,
    no_autocast,
    refuse_second_derivatives,
    wants_one_node,
)
from mamba_ssm.ops._shared import checks
from mamba_ssm.ops.causal_conv1d.arguments import wants_silu
from mamba_ssm.ops.mamba2_block.forward import Inputs, Options, split_conv1d_scan_backward_op, split_conv1d_scan_op
from mamba_ssm.ops.ssd.forward import check_options

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
    outproj_bias = _bias_of(outproj_bias, zxbcdt)
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
        checks.check_number(_NAME, "rmsnorm_eps", rmsnorm_eps),
        bool(norm_before_gate),
        A_is_log=False,
    )
    return_final_states = bool(return_final_states)
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError(f"{_NAME}: outproj_bias is given, but outproj_weight is None")
    if outproj_weight is not None and wants_one_node((*inputs, outproj_weight, outproj_bias)):
        result = apply(_Mamba2Inner, outproj_weight, outproj_bias, *inputs, *options, return_final_states)
        out, states = result if return_final_states else (result, None)
    else:
        out, _, _, states = call(split_conv1d_scan_op, *inputs, *options, return_final_states, False)
        if outproj_weight is not None:
            out = _project(out, outproj_weight, outproj_bias)
    if not return_final_states:
        return out
    return out, states if state_dtype is None else states.to(state_dtype)


def mamba2_block(
    hidden_states,
    in_proj_weight,
    in_proj_bias,
    outproj_weight,
    outproj_bias,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A_log,
    D,
    seq_idx,
    rmsnorm_weight,
    options,
):
    """mamba_split_conv1d_scan_combined from the block's input on: hidden_states (B, L, d_model) -> (B, L, d_model), for
    modules.Mamba2.

    in_proj_weight: (2 d_mlp + 2 H P + 2 G N + H, d_model); in_proj_bias: its rows, or None.
    conv1d_weight: (H P + 2 G N, 1, W). A_log: (H), where A = -exp(A_log), and dt_bias: any float dtype. options:
    Options with A_is_log=True. The others as for mamba_split_conv1d_scan_combined.
    One autograd node, for the reason of mamba_block in mamba_ssm.ops.mamba_inner; it keeps what the two nodes would.
    """
    projections = hidden_states, in_proj_weight, in_proj_bias, outproj_weight, outproj_bias
    dt_bias, A_log = _readable(dt_bias), _readable(A_log)
    inner = conv1d_weight, conv1d_bias, dt_bias, A_log, D, seq_idx, rmsnorm_weight
    if wants_one_node((*projections, *inner)):
        return apply(_Mamba2Block, *projections, *inner, *options)
    zxbcdt = F.linear(hidden_states, in_proj_weight, in_proj_bias)
    inputs = _block_inputs(zxbcdt, *inner)
    out, _, _, _ = call(split_conv1d_scan_op, *inputs, *options, False, False)
    return F.linear(out, outproj_weight, _bias_of(outproj_bias, out))


def _readable(parameter):
    """In a dtype that kernels read: float64 as float32."""
    return parameter.float() if parameter.dtype == torch.float64 else parameter


def _block_inputs(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A_log, D, seq_idx, rmsnorm_weight):
    """The operator's inputs from the block's."""
    conv1d = conv1d_weight.squeeze(1), conv1d_bias
    return Inputs(zxbcdt, *conv1d, dt_bias, A_log, D.float(), None, seq_idx, rmsnorm_weight)


def _bias_of(bias, like):
    return None if bias is None else checks.cast(bias, like.dtype)


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


# ---- autograd --------------------------------------------------------------------------------------------------------


def _gradients(dout, dstates, saved, options, need_outproj_weight, need_outproj_bias, need_initial_states):
    """Of outproj_weight, outproj_bias and the inputs. All that is saved has forward's dtype: no autocast may be on."""
    outproj_weight, *tensors = saved
    batch, seqlen, d_model = dout.shape
    rows = dout.reshape(batch * seqlen, d_model)
    dgated = torch.mm(rows, outproj_weight).view(batch, seqlen, outproj_weight.shape[1])
    dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, drmsnorm_weight, out = call_in_backward(
        split_conv1d_scan_backward_op, dgated, dstates, *tensors, *options, need_initial_states, need_outproj_weight
    )
    doutproj_weight = torch.mm(rows.t(), out.view(batch * seqlen, out.shape[2])) if need_outproj_weight else None
    doutproj_bias = rows.sum(0) if need_outproj_bias else None
    grads = Inputs(dzxbcdt, dweight, dbias, ddt_bias, dA, dD, dinitial_states, None, drmsnorm_weight)
    return doutproj_weight, doutproj_bias, grads


class _Mamba2Inner(torch.autograd.Function):
    """split_conv1d_scan and the output projection; keeps what the operator alone would, not the projection's input."""

    @staticmethod
    def forward(ctx, outproj_weight, outproj_bias, *arguments):
        out, y, rstd, states = call_below_autograd(split_conv1d_scan_op, *arguments, True)
        ctx.save_for_backward(outproj_weight, y, rstd, *arguments[:9])
        ctx.options = arguments[9:17]
        ctx.set_materialize_grads(False)
        with no_autocast(out):
            out = _project(out, outproj_weight, outproj_bias)
        return out if states is None else (out, states)  # the compiler of torch 2.4 fails at a None

    @staticmethod
    def backward(ctx, dout, dstates=None):
        saved = ctx.saved_tensors
        if dout is None and dstates is None:
            return (None,) * 20
        if dout is None:  # out itself was not used
            outproj_weight, zxbcdt = saved[0], saved[3]
            dout = zxbcdt.new_zeros((*zxbcdt.shape[:2], outproj_weight.shape[0]))
        need = ctx.needs_input_grad
        with no_autocast(dout):
            doutproj_weight, doutproj_bias, grads = _gradients(
                dout, dstates, saved, ctx.options, need[0], need[1], need[8]
            )
        return doutproj_weight, doutproj_bias, *grads, *(None,) * 9


class _Mamba2Block(torch.autograd.Function):
    """_Mamba2Inner with the input projection in front and A_log in place of A."""

    @staticmethod
    def forward(ctx, *arguments):
        projections, inner, options = arguments[:5], arguments[5:12], arguments[12:]
        dtype = autocast_dtype(projections[0])
        if dtype is not None:
            projections = [checks.cast(tensor, dtype) for tensor in projections]
        hidden_states, in_proj_weight, in_proj_bias, *out_proj = projections
        with no_autocast(hidden_states):
            zxbcdt = F.linear(hidden_states, in_proj_weight, in_proj_bias)
            inputs = _block_inputs(zxbcdt, *inner)
            gated, y, rstd, _ = call_below_autograd(split_conv1d_scan_op, *inputs, *options, False, True)
            out = F.linear(gated, out_proj[0], _bias_of(out_proj[1], gated))
        need_input, need_weight, *_ = ctx.needs_input_grad
        kept = in_proj_weight if need_input else None, hidden_states if need_weight else None
        ctx.save_for_backward(*kept, out_proj[0], y, rstd, *inputs)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives("the gradient of Mamba2")
        in_proj_weight, hidden_states, *saved = ctx.saved_tensors
        need = ctx.needs_input_grad
        with no_autocast(dout):
            doutproj_weight, doutproj_bias, grads = _gradients(dout, None, saved, ctx.options, need[3], need[4], False)
            batch, seqlen, width = grads.zxbcdt.shape
            rows = grads.zxbcdt.view(batch * seqlen, width)
            dhidden_states = din_proj_weight = None
            if in_proj_weight is not None:
                dhidden_states = torch.mm(rows, in_proj_weight).view(batch, seqlen, in_proj_weight.shape[1])
            if hidden_states is not None:
                columns = hidden_states.reshape(batch * seqlen, hidden_states.shape[2])
                din_proj_weight = torch.mm(rows.t(), columns)
            din_proj_bias = rows.sum(0) if need[2] else None
        # autograd takes each gradient to its input's dtype
        projections = dhidden_states, din_proj_weight, din_proj_bias, doutproj_weight, doutproj_bias
        conv1d = grads.conv1d_weight.unsqueeze(1), grads.conv1d_bias
        inner = *conv1d, grads.dt_bias, grads.A, grads.D, None, grads.rmsnorm_weight
        return *projections, *inner, *(None,) * 8
