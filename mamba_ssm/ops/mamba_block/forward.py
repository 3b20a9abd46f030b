"""The inside of a Mamba block: the public function, and convolution, projections, scan and gate as one operator.

In memory everything is (channels, batch, length): one matrix of B*L columns, so that a projection is one product and no
copy. Kernels take parts of tensors as addresses, and arguments are checked once: in a small block that is half of the
time. Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import (
    autocast_dtype,
    autocast_state,
    call,
    call_below_autograd,
    call_in_backward,
    define,
    module_behind,
    no_autocast,
    no_gradients,
    reference,
    returns,
    signature,
    unpack,
)
from mamba_ssm.ops.mamba_block.arguments import (
    NAME,
    Before,
    Inputs,
    Kept,
    Options,
    channel_major,
    channels,
    check,
    convolve,
    delta_of,
    matrix_of,
    scan_inputs,
    sources,
)
from mamba_ssm.ops.mamba_block.backward import Gradients, mamba_inner_backward_op, of_inputs
from mamba_ssm.ops.mamba_block.composed import pieces, project_out, scan
from mamba_ssm.ops.mamba_block.reference import mamba_inner_ref
from mamba_ssm.ops.selective_scan.arguments import check_fake
from mamba_ssm.ops.selective_scan.carry import launch_carry
from mamba_ssm.ops.selective_scan.forward import Results as ScanResults
from mamba_ssm.ops.selective_scan.forward import launch_forward as launch_scan


class Wanted(typing.NamedTuple):
    """Which of the operator's results a caller wants."""

    keep: bool  # what backward starts from


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor | torch.nn.Module,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor | torch.nn.Module,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    reverse: bool = False,
) -> torch.Tensor:
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
        reverse: convolution and scan run from the last step to the first: a step sees itself and what lies behind it.

    In place of x_proj_weight and out_proj_weight there may be modules that are more than a weight (LoRA, a quantised
    layer): they are called, out_proj with its own bias, and backward keeps more. If a layer of transformers calls,
    which hands over such a module's weight, the module is found and called too, but not under torch.compile.

    Returns:
        (B, L, d_model). Under autocast xz and the projections are cast to autocast's dtype; A, D and the bias of delta
        stay float32.

    Same as upstream's mamba_ssm.ops.selective_scan_interface.mamba_inner_fn, without complex A.
    """
    if not isinstance(checkpoint_lvl, int) or checkpoint_lvl not in (0, 1):
        raise ValueError(f"{NAME}: checkpoint_lvl must be 0 or 1, got {checkpoint_lvl!r}")
    checks.check_tensor(NAME, "xz", xz)
    x_proj, out_proj = module_behind(x_proj_weight), module_behind(out_proj_weight)
    # Where these are read they are no modules.
    x_weight, out_weight = typing.cast(torch.Tensor, x_proj_weight), typing.cast(torch.Tensor, out_proj_weight)
    if x_proj is not None or out_proj is not None or reference.exporting:
        given = pieces(
            xz,
            conv1d_weight,
            conv1d_bias,
            x_weight if x_proj is None else x_proj,
            delta_proj_weight,
            A.shape[-1],
            B,
            C,
            B_proj_bias,
            C_proj_bias,
            b_rms_weight,
            c_rms_weight,
            dt_rms_weight,
            b_c_dt_rms_eps,
            reverse=reverse,
        )
        y = scan(given, A, D, delta_bias, delta_softplus, reverse).transpose(1, 2)
        return out_proj(y) if out_proj is not None else project_out(y, out_weight, out_proj_bias)
    if reference.on:
        weights = conv1d_weight, conv1d_bias, x_weight, delta_proj_weight, out_weight, out_proj_bias
        rest = delta_bias, B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl
        norms = b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps
        return mamba_inner_ref(xz, *weights, A, B, C, D, *rest, *norms, reverse=reverse)
    dtype = autocast_dtype(xz)
    if dtype is not None:
        xz, x_weight, delta_proj_weight, out_weight = (
            checks.cast(tensor, dtype) for tensor in (xz, x_weight, delta_proj_weight, out_weight)
        )
    if out_proj_bias is not None:
        out_proj_bias = checks.cast(out_proj_bias, xz.dtype)
    inputs = Inputs(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_weight,
        delta_proj_weight,
        out_weight,
        out_proj_bias,
        checks.widen(A),
        None if B is None else _given(B, dtype),
        None if C is None else _given(C, dtype),
        checks.widen(D),
        checks.widen(delta_bias),
        B_proj_bias,
        C_proj_bias,
        b_rms_weight,
        c_rms_weight,
        dt_rms_weight,
    )
    eps = checks.check_number(NAME, "b_c_dt_rms_eps", b_c_dt_rms_eps)
    options = bool(delta_softplus), eps, int(checkpoint_lvl)
    return call(mamba_inner_op, *inputs, *options, False, bool(reverse))[0]


def _given(matrix, dtype):
    """A B or C that does not come from x_proj: a constant (D, N) is a parameter, a variable one an activation."""
    if isinstance(matrix, torch.Tensor) and matrix.dim() == 2:
        return checks.widen(matrix)
    return matrix if dtype is None else checks.cast(matrix, dtype)


# ---- operator --------------------------------------------------------------------------------------------------------


class Results(typing.NamedTuple):
    """The operator's results: the output, and what is kept (see Kept)."""

    out: torch.Tensor
    x_dbl: torch.Tensor | None
    checkpoints: torch.Tensor | None
    conv_out: torch.Tensor | None
    delta: torch.Tensor | None


def _allocate(inputs, sizes, options, wanted):
    """The operator's results, without values."""
    xz, keep, columns = inputs.xz, wanted.keep, sizes.columns
    keep_more = keep and options.checkpoint_lvl == 0
    return Results(
        xz.new_empty((sizes.batch, sizes.seqlen, sizes.d_model)),
        xz.new_empty((inputs.x_proj_weight.shape[0], columns)) if keep else None,
        _allocate_checkpoints(inputs, sizes) if keep else None,
        xz.new_empty((sizes.dim, columns)) if keep_more else None,
        xz.new_empty((sizes.dim, columns)) if keep_more else None,
    )


def _allocate_checkpoints(inputs, sizes):
    return inputs.A.new_empty((sizes.scan.checkpoints,))


def _forward(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs)
    if sizes.columns == 0:
        return _allocate(inputs, sizes, options, wanted)
    y, kept, _ = scan_forward(channel_major(inputs.xz, sizes), inputs, sizes, options, wanted.keep)
    out = F.linear(y.t(), inputs.out_proj_weight, inputs.out_proj_bias)
    return Results(out.view(sizes.batch, sizes.seqlen, sizes.d_model), *kept)


def scan_forward(xz, inputs, sizes, options, keep, other=None, neighbours=None):
    """The gated scan's output (D, B*L), before the output projection; with keep what backward starts from; and Before.

    other: of the scan in the other direction; this one, with reverse, adds to it.
    neighbours: to which a part of a sequence passes on what they need, see ops/carry.py; None: all of it is here.
    """
    eps = options.rms_eps
    inputs_before = state = carry = None
    if neighbours is not None:
        inputs_before = neighbours.inputs_before()
    conv_out = convolve(xz, inputs, sizes, options, inputs_before)
    x_dbl = torch.mm(inputs.x_proj_weight, conv_out)
    delta = delta_of(x_dbl, inputs, sizes, eps).contiguous()
    B, C = (matrix_of(source, x_dbl, sizes, eps)[0] for source in sources(inputs, sizes))
    y = torch.empty_like(conv_out) if other is None else other
    checkpoints = _allocate_checkpoints(inputs, sizes) if keep else None
    scan = scan_inputs(conv_out, delta, B, C, xz, inputs, sizes)
    if neighbours is not None:
        carry = launch_carry(sizes.scan, scan, options.scan)
        state = neighbours.state_before(carry.passed_on, carry.shape)
        scan = scan._replace(initial_state=state)
    if sizes.columns:
        results = ScanResults(channels(y, sizes), None, checkpoints)
        launch_scan(sizes.scan, scan, options.scan, results, carry, add=other is not None)
    before = Before(inputs_before, state)
    if not keep:
        return y, Kept(None, None, None, None), before
    if options.checkpoint_lvl == 1:
        conv_out = delta = None
    return y, Kept(x_dbl, checkpoints, conv_out, delta), before


def _forward_fake(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs)
    check_fake(NAME, inputs)
    return _allocate(inputs, sizes, options, wanted)


class _MambaInner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        inputs, ctx.options, wanted = unpack(arguments, Inputs, Options, Wanted)
        *options, reverse = ctx.options
        results = call_below_autograd(mamba_inner_op, *inputs, *options, True, reverse)
        out, *kept = results
        ctx.save_for_backward(*inputs, *kept)
        ctx.set_materialize_grads(False)
        if not wanted.keep:
            return out, *(None for _ in kept)
        ctx.mark_non_differentiable(*(tensor for tensor in kept if tensor is not None))
        return results

    @staticmethod
    def backward(ctx, dout, *_):
        if dout is None:
            return no_gradients(Inputs, Options, Wanted)
        with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
            grads = call_in_backward(mamba_inner_backward_op, dout, *ctx.saved_tensors, *ctx.options)
        return *of_inputs(Gradients(*grads)), *no_gradients(Options, Wanted)


mamba_inner_op = define(
    f"mamba_inner({signature(Inputs, Options, Wanted)}) -> {returns(Results)}",
    _forward,
    _forward_fake,
    autograd=_MambaInner,
    called=NAME,
    planned=(autocast_state,),
)
