"""The inside of a Mamba-2 block: the public function, and convolution, scan, gate and norm as one operator.

The input projection's output zxbcdt is cut, not copied. On CUDA a NaN reaches all of its tile of up to 64 steps, as in
mamba_ssm.ops.ssd. The output projection is a plain torch matrix product, so that compilers see it.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import (
    apply,
    autocast_dtype,
    call,
    call_below_autograd,
    call_in_backward,
    define,
    module_behind,
    no_autocast,
    no_gradients,
    reference,
    signature,
    unpack,
    unpack_traced,
    wants_one_node,
)
from mamba_ssm.ops._shared.gradients import product
from mamba_ssm.ops.causal_conv1d import wants_silu
from mamba_ssm.ops.mamba2_block.arguments import (
    NAME,
    Inputs,
    Kept,
    Options,
    check,
    convolve,
    cut,
    heads,
    kernel_layout,
    mlp,
    norm_options,
    scan_inputs,
)
from mamba_ssm.ops.mamba2_block.backward import of_inputs, split_conv1d_scan_backward_op
from mamba_ssm.ops.mamba2_block.reference import mamba_split_conv1d_scan_ref
from mamba_ssm.ops.norm.gated import launch_forward as launch_norm
from mamba_ssm.ops.norm.gated_arguments import Inputs as NormInputs
from mamba_ssm.ops.norm.swiglu import launch_forward as launch_swiglu
from mamba_ssm.ops.ssd.arguments import check_options
from mamba_ssm.ops.ssd.forward import launch_forward as launch_scan


class OutProj(typing.NamedTuple):
    """The output projection's parameters."""

    outproj_weight: torch.Tensor
    outproj_bias: torch.Tensor | None


class Wanted(typing.NamedTuple):
    """Which of the operator's results a caller wants."""

    return_final_states: bool
    keep: bool  # what backward starts from


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    A: torch.Tensor,
    D: torch.Tensor | None,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float | None = 1e-6,
    outproj_weight: torch.Tensor | torch.nn.Module | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A Mamba-2 block between its input projection and its residual.

    Args:
        zxbcdt: (B, L, 2 d_mlp + 2 H P + 2 G N + H) float32, float16 or bfloat16: gate and input of the gated MLP (d_mlp
            channels, usually none), z, and x, B, C and dt of the scan.
        conv1d_weight: (H P + 2 G N, W), W 2..4; conv1d_bias: (H P + 2 G N) or None; of any of these dtypes.
        dt_bias, A: (H); D: (H), or (H, P), or None; float32, or widened to it. dt = softplus(dt + dt_bias).
        chunk_size: a positive integer, upstream's tile size. It has no effect: the kernels choose their own.
        initial_states: (B, H, P, N) float32, the states before the first step; zero if None.
        seq_idx: (B, L) int32; convolution and states restart at each step whose value differs from the step before, but
            not at the first one. A negative value is padding: the convolution's output is zero there.
        dt_limit: (smallest, largest) value of dt, which is then clamped.
        activation: of the convolution: "silu", "swish" or None.
        rmsnorm_weight: (H P) of any of these dtypes: RMSNorm over groups of H P / G channels, with rmsnorm_eps,
            before (norm_before_gate) or after the gate silu(z). None: only the gate, and rmsnorm_eps may be None too.
        outproj_weight: (d_model, d_mlp + H P) and outproj_bias: (d_model); None to return before the projection. In
            place of the weight there may be a module that is more than it (LoRA, a quantised layer): it is called, with
            its own bias. If a layer of transformers calls, which hands over such a module's weight, the module is
            found and called too, but not under torch.compile.
        headdim: P; may be None if D is (H, P). ngroups: G.
        state_dtype: dtype of the returned states, float32 if None.
        reverse: convolution and scan run from the last step to the first, so that a step sees itself and what lies
            behind it; the initial states stand behind the last step, the final ones are those at step 0.

    Returns:
        out (B, L, d_model), or (B, L, d_mlp + H P) without outproj_weight, of zxbcdt's dtype; with return_final_states
        (out, final_states (B, H, P, N)). Under autocast zxbcdt and the projection are cast to autocast's dtype.
        A NaN of zxbcdt stays in its row of out and, on the CPU, behind its step; on CUDA it may reach all of its tile
        of up to 64 steps.

    Differentiable in every floating-point argument. Kept for backward are the arguments, and with rmsnorm_weight
    the scan's output (B, L, H P) in zxbcdt's dtype and 1 / rms (B, L, G) float32; the rest is computed again.

    Same as upstream's mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined.
    """
    dt_min, dt_max = check_options(NAME, chunk_size, dt_limit, state_dtype)
    if not isinstance(ngroups, int):
        raise TypeError(f"{NAME}: ngroups must be an integer, got {ngroups!r}")
    checks.check_tensor(NAME, "zxbcdt", zxbcdt)
    out_proj = module_behind(outproj_weight)
    if out_proj is not None:
        outproj_weight = outproj_bias = None
    outproj_weight = typing.cast(torch.Tensor | None, outproj_weight)  # and no module from here on
    if reference.on:
        of_scan: typing.Any = {"chunk_size": chunk_size, "dt_limit": dt_limit, "dt_bias": dt_bias, "A": A, "D": D}
        results: typing.Any = mamba_split_conv1d_scan_ref(
            zxbcdt,
            conv1d_weight,
            conv1d_bias,
            **of_scan,
            activation=activation,
            rmsnorm_weight=rmsnorm_weight,
            rmsnorm_eps=1e-6 if rmsnorm_eps is None else rmsnorm_eps,
            outproj_weight=outproj_weight,
            outproj_bias=outproj_bias,
            headdim=headdim,
            ngroups=ngroups,
            norm_before_gate=norm_before_gate,
            initial_states=initial_states,
            seq_idx=seq_idx,
            return_final_states=True,
            reverse=reverse,
        )
        out = results[0] if out_proj is None else out_proj(results[0])
        return (out, results[1].to(state_dtype or results[1].dtype)) if return_final_states else out
    dtype = autocast_dtype(zxbcdt)
    if dtype is not None:
        zxbcdt = checks.cast(zxbcdt, dtype)
        outproj_weight = checks.cast(outproj_weight, dtype)
    if outproj_bias is not None:
        outproj_bias = checks.cast(outproj_bias, zxbcdt.dtype)
    if rmsnorm_weight is None and rmsnorm_eps is None:
        rmsnorm_eps = 0.0  # not read
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
        dt_min,
        dt_max,
        wants_silu(NAME, activation),
        checks.check_number(NAME, "rmsnorm_eps", rmsnorm_eps),
        bool(norm_before_gate),
        A_is_log=False,
        reverse=bool(reverse),
    )
    return_final_states = bool(return_final_states)
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError(f"{NAME}: outproj_bias is given, but outproj_weight is None")
    states: typing.Any  # a tensor if return_final_states
    if outproj_weight is not None and wants_one_node((*inputs, outproj_weight, outproj_bias)):
        result = apply(_Mamba2Inner, outproj_weight, outproj_bias, *inputs, *options, return_final_states)
        out, states = result if return_final_states else (result, None)
    else:
        wanted = return_final_states, False, options.reverse
        out, _, _, states = call(split_conv1d_scan_op, *inputs, *options[:-1], *wanted)
        if outproj_weight is not None:
            out = _project(out, outproj_weight, outproj_bias)
    if out_proj is not None:
        out = out_proj(out)
    if not return_final_states:
        return out
    return out, states if state_dtype is None else states.to(state_dtype)


def _headdim(D, headdim):
    if isinstance(D, torch.Tensor) and D.dim() == 2:
        if headdim not in (None, D.shape[1]):
            raise ValueError(f"{NAME}: headdim is {headdim}, but D has shape (H, P) = {tuple(D.shape)}")
        return D.shape[1]
    if not isinstance(headdim, int):
        raise ValueError(f"{NAME}: headdim must be given where D is not (H, P), got {headdim!r}")
    return headdim


def _project(out, weight, bias):
    checks.check_dims(NAME, "outproj_weight", weight, 2, "(d_model, d_mlp + H P)")
    shape = (weight.shape[0], out.shape[-1])
    checks.check_same(NAME, "outproj_weight", weight, shape, out, "zxbcdt", "(d_model, d_mlp + H P)")
    if bias is not None:
        checks.check_tensor(NAME, "outproj_bias", bias)
        checks.check_same(NAME, "outproj_bias", bias, shape[:1], out, "zxbcdt", "(d_model,)")
    return F.linear(out, weight, bias)


# ---- operator --------------------------------------------------------------------------------------------------------


def _allocate(inputs, sizes, wanted):
    """The operator's outputs, without values."""
    zxbcdt, A = inputs.zxbcdt, inputs.A
    batch, seqlen, dim = sizes.batch, sizes.seqlen, sizes.dim
    out = zxbcdt.new_empty((batch, seqlen, sizes.d_mlp + dim))
    y = rstd = None
    if wanted.keep and inputs.rmsnorm_weight is not None:
        y = zxbcdt.new_empty((batch, seqlen, dim))
        rstd = A.new_empty((batch, seqlen, sizes.ngroups), dtype=torch.float32)
    states = A.new_empty(sizes.states, dtype=torch.float32) if wanted.return_final_states else None
    return out, y, rstd, states


def _forward(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs, options)
    results = out, y, rstd, final_states = _allocate(inputs, sizes, wanted)
    inputs, row_stride = kernel_layout(inputs, options.reverse)
    zxbcdt, initial_states = inputs.zxbcdt, inputs.initial_states
    if sizes.d_mlp:
        launch_swiglu(mlp(zxbcdt, sizes), out.narrow(2, 0, sizes.d_mlp))
    if sizes.empty:
        if wanted.return_final_states:
            final_states.zero_() if initial_states is None else final_states.copy_(initial_states)
        return results
    z, xBC, dt = cut(zxbcdt, row_stride, sizes)
    conv_out = convolve(xBC, inputs, sizes, options)
    if inputs.rmsnorm_weight is None:
        gated = heads(out, sizes, sizes.d_mlp)
        launch_scan(sizes, scan_inputs(conv_out, dt, z, inputs, sizes), options, gated, final_states)
        return results
    if y is None:
        y = zxbcdt.new_empty((sizes.batch, sizes.seqlen, sizes.dim))
    launch_scan(sizes, scan_inputs(conv_out, dt, None, inputs, sizes), options, heads(y, sizes), final_states)
    launch_gated_norm(y, (z, row_stride), inputs, options, sizes, out, rstd)
    return results


def launch_gated_norm(y, z, inputs, options, sizes, out, rstd):
    """Writes the columns of out behind the gated MLP's, and rstd unless it is None. z: rows."""
    norm = NormInputs((y, sizes.dim), inputs.rmsnorm_weight, None, z)
    gated = heads(out, sizes, sizes.d_mlp), sizes.d_mlp + sizes.dim
    launch_norm(sizes.rows, norm, options.rmsnorm_eps, norm_options(options, sizes), gated, (None, rstd))


def _forward_fake(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    return _allocate(inputs, check(inputs, options), wanted)


class _SplitConv1dScan(torch.autograd.Function):
    """Keeps the inputs, of which zxbcdt is the large one, and with a norm the scan's output and 1 / rms of each group.

    Backward convolves again; without a norm it also scans again, for the output before the gate.
    """

    @staticmethod
    def forward(ctx, *arguments):
        inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
        keep = inputs.rmsnorm_weight is not None
        out, y, rstd, states = call_below_autograd(
            split_conv1d_scan_op, *inputs, *options[:-1], wanted.return_final_states, keep, options.reverse
        )
        ctx.save_for_backward(y, rstd, *inputs)
        ctx.options = options
        ctx.out_shape = out.shape
        ctx.set_materialize_grads(False)
        if not wanted.keep:
            return out, None, None, states
        if y is not None:
            ctx.mark_non_differentiable(y, rstd)
        return out, y, rstd, states

    @staticmethod
    def backward(ctx, dout, dy, drstd, dfinal_states):
        if dout is None and dfinal_states is None:
            return no_gradients(Inputs, Options, Wanted)
        saved = ctx.saved_tensors
        if dout is None:  # out itself was not used
            _, inputs = unpack(saved, Kept, Inputs)
            dout = inputs.zxbcdt.new_zeros(ctx.out_shape)
        (need,) = unpack(ctx.needs_input_grad, Inputs)
        *options, reverse = ctx.options
        arguments = dout, dfinal_states, *saved, *options, need.initial_states, False, reverse
        grads, _ = of_inputs(call_in_backward(split_conv1d_scan_backward_op, *arguments))
        return *grads, *no_gradients(Options, Wanted)


split_conv1d_scan_op = define(
    f"split_conv1d_scan({signature(Inputs, Options, Wanted)}) "
    "-> (Tensor out, Tensor y, Tensor rstd, Tensor final_states)",
    _forward,
    _forward_fake,
    autograd=_SplitConv1dScan,
    called=NAME,
    planned=(),
)


# ---- operator and output projection as one node ----------------------------------------------------------------------


class _Mamba2Inner(torch.autograd.Function):
    """split_conv1d_scan and the output projection; keeps what the operator alone would, not the projection's input."""

    @staticmethod
    def forward(ctx, *arguments):
        out_proj, inputs, ctx.options = unpack_traced(arguments, OutProj, Inputs, Options)
        *_, return_final_states = arguments
        *options, reverse = ctx.options
        out, y, rstd, states = call_below_autograd(
            split_conv1d_scan_op, *inputs, *options, return_final_states, True, reverse
        )
        ctx.save_for_backward(out_proj.outproj_weight, y, rstd, *inputs)
        ctx.set_materialize_grads(False)
        with no_autocast(out):
            out = _project(out, *out_proj)
        return out if states is None else (out, states)  # the compiler of torch 2.4 fails at a None

    @staticmethod
    def backward(ctx, dout, dstates=None):
        if dout is None and dstates is None:
            return *no_gradients(OutProj, Inputs, Options), None
        outproj_weight, *saved = ctx.saved_tensors
        if dout is None:  # out itself was not used
            _, inputs = unpack_traced(saved, Kept, Inputs)
            batch, seqlen, _ = inputs.zxbcdt.shape
            dout = inputs.zxbcdt.new_zeros((batch, seqlen, outproj_weight.shape[0]))
        need_out_proj, need = unpack_traced(ctx.needs_input_grad, OutProj, Inputs)
        with no_autocast(dout):
            need_weight = outproj_weight.dtype if need_out_proj.outproj_weight else None
            need_bias = need_out_proj.outproj_bias
            doutproj_weight, doutproj_bias, grads = inner_gradients(
                dout, dstates, outproj_weight, saved, ctx.options, need_weight, need_bias, need.initial_states
            )
        return doutproj_weight, doutproj_bias, *grads, *no_gradients(Options), None


def inner_gradients(dout, dstates, outproj_weight, saved, options, need_weight, need_bias, need_initial_states):
    """Gradients of outproj_weight and outproj_bias (where need_weight, need_bias) and of the operator's inputs.

    need_weight: the gradient's dtype, see product; or None. dout: of the projection's output. saved: Kept and Inputs,
    flat. All that is saved has forward's dtype: no autocast may be on.
    """
    batch, seqlen, d_model = dout.shape
    rows = dout.reshape(batch * seqlen, d_model)
    dgated = torch.matmul(dout, outproj_weight)
    *options, reverse = options
    arguments = dgated, dstates, *saved, *options, need_initial_states, need_weight is not None, reverse
    grads, out = of_inputs(call_in_backward(split_conv1d_scan_backward_op, *arguments))
    dweight = None
    if need_weight is not None:
        dweight = product(rows.t(), out.view(batch * seqlen, out.shape[2]), need_weight)
    return dweight, rows.sum(0) if need_bias else None, grads
