"""A Mamba-3 layer from in_proj's output to out_proj's input as one operator, with a backward operator that keeps its
inputs alone.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._torch import (
    call,
    call_below_autograd,
    call_in_backward,
    define,
    make,
    no_gradients,
    reference,
    signature,
    unpack,
)
from mamba_ssm.ops.mamba3_block.block_arguments import (
    NAME,
    Inputs,
    Options,
    check,
    cut,
    kernel_layout,
    out_shape,
    prepare,
    scan_inputs,
)
from mamba_ssm.ops.mamba3_block.block_backward import Gradients, mamba3_block_backward_op
from mamba_ssm.ops.mamba3_block.reference import mamba3_block_ref
from mamba_ssm.ops.mamba3_scan import States
from mamba_ssm.ops.mamba3_scan.arguments import check_bounds_at_hand
from mamba_ssm.ops.mamba3_scan.forward import launch_forward


class Wanted(typing.NamedTuple):
    """Which of the results a caller wants."""

    return_final_states: bool


def mamba3_block(
    zxBCdt: torch.Tensor,
    dt_bias: torch.Tensor,
    B_weight: torch.Tensor,
    C_weight: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor | None = None,
    mimo_x: torch.Tensor | None = None,
    mimo_z: torch.Tensor | None = None,
    mimo_o: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    *,
    headdim: int,
    ngroups: int = 1,
    A_floor: float = 1e-4,
    A_softplus: bool = False,
    B_eps: float = 1e-5,
    C_eps: float = 1e-5,
    norm_eps: float = 1e-5,
    gate: bool = True,
    pairwise: bool = True,
    initial_states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, States]:
    """What a Mamba-3 layer does between in_proj and out_proj, with gradients of every floating-point argument.

    mamba3_scan of: Q = rms_norm(C, C_weight), K = rms_norm(B, B_weight), DT = softplus(dt + dt_bias), ADT = A DT with
    A = -max(f(a), A_floor), and x, z, trap and angles as they are, where zxBCdt holds z, x, B, C, dt, a, trap and
    angles side by side; f(a) is 1 + a from 0 on and 1 / (1 - a) below, or with A_softplus log(1 + e^a).

    Letters: B batch, L length, R rank, H heads, P headdim, G ngroups, N dstate, S angles.

    Args:
        zxBCdt: (B, L, 2 H P + 2 R G N + 3 H + S), float32, float16 or bfloat16.
        dt_bias, D: (H). B_weight, C_weight: (N). B_bias, C_bias: (H, R, N). mimo_x, mimo_z, mimo_o: (H, R, P), ones if
            None. norm_weight: (H P); without it there is no norm before the gate. float32, float16 or bfloat16.
        gate: whether the rows are multiplied by silu(z mimo_z).
        initial_states, seq_idx, cu_seqlens, pairwise, return_final_states: as mamba3_scan's.

    Returns:
        out (B, L, H, P) of zxBCdt's dtype, without mimo_o (B, L, R, H, P); with return_final_states a tuple of it and
        States, float32.

    Raises:
        TypeError: a dtype is wrong. ValueError: a shape, a device or a value is wrong.

    Only the inputs are kept for backward, which has no CUDA kernel for ranks above 16.
    """
    if initial_states is None:
        states: tuple[torch.Tensor | None, ...] = (None,) * 4
    elif len(initial_states) == 4:
        states = tuple(map(checks.widen, initial_states))
    else:
        raise ValueError(f"{NAME}: initial_states must be four tensors or None, got {len(initial_states)}")
    biases = checks.widen(B_bias), checks.widen(C_bias)
    others = map(checks.widen, (D, mimo_x, mimo_z, mimo_o, norm_weight))
    tensors = zxBCdt, checks.widen(dt_bias), B_weight, C_weight, *biases, *others
    if cu_seqlens is not None:
        checks.check_dims(NAME, "zxBCdt", zxBCdt, 3, "(B, L, 2 H P + 2 R G N + 3 H + S)")
        check_bounds_at_hand(NAME, zxBCdt, cu_seqlens)
    sizes = checks.check_integer(NAME, "headdim", headdim), checks.check_integer(NAME, "ngroups", ngroups)
    eps = [
        checks.check_number(NAME, name, value)
        for name, value in (("B_eps", B_eps), ("C_eps", C_eps), ("norm_eps", norm_eps))
    ]
    rate = checks.check_number(NAME, "A_floor", A_floor), bool(A_softplus)
    options = *sizes, *rate, *eps, bool(gate), bool(pairwise)
    wanted = bool(return_final_states)
    if reference.on:
        given = None if initial_states is None else states
        everything: typing.Any = *tensors, *options, given, seq_idx, cu_seqlens, wanted
        return mamba3_block_ref(*everything)
    out, *finals = call(mamba3_block_op, *tensors, *states, seq_idx, cu_seqlens, *options, wanted)
    return (out, States(*finals)) if return_final_states else out


# ---- operator --------------------------------------------------------------------------------------------------------


def _allocate(sizes, inputs, wanted):
    """The operator's outputs, without values; zero where packed sequences may leave steps out at the end."""
    zxBCdt = inputs.zxBCdt
    make_new = zxBCdt.new_empty if inputs.cu_seqlens is None else zxBCdt.new_zeros
    shapes = sizes.scan.states if wanted.return_final_states else ()
    finals = [zxBCdt.new_empty(shape, dtype=torch.float32) for shape in shapes] or [None] * 4
    return (make_new(out_shape(sizes, inputs)), *finals)


def _forward(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    sizes = check(inputs, options)
    results = _allocate(sizes, inputs, wanted)
    inputs, row_stride = kernel_layout(inputs)
    parts = cut(inputs.zxBCdt, row_stride, sizes)
    prepared = prepare(sizes, inputs, options, parts, row_stride)
    launch_forward(sizes.scan, scan_inputs(inputs, options, parts, prepared), options.scan, *results)
    return results


def _forward_fake(*arguments):
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    return _allocate(check(inputs, options), inputs, wanted)


class _Mamba3Block(torch.autograd.Function):
    """Saves the inputs alone, of which zxBCdt is the large one."""

    @staticmethod
    def forward(ctx, *arguments):
        inputs, ctx.options, _ = unpack(arguments, Inputs, Options, Wanted)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        results = call_below_autograd(mamba3_block_op, *arguments)
        ctx.out_shape = results[0].shape
        return results

    @staticmethod
    def backward(ctx, dout, *dfinals):
        if dout is None and all(gradient is None for gradient in dfinals):
            return no_gradients(Inputs, Options, Wanted)
        inputs = make(Inputs, ctx.saved_tensors)
        if dout is None:
            dout = inputs.zxBCdt.new_zeros(ctx.out_shape)
        grads = call_in_backward(mamba3_block_backward_op, dout, *dfinals, *inputs, *ctx.options)
        rest = len(Inputs._fields) - len(Gradients._fields)  # seq_idx and cu_seqlens
        return *grads, *(None,) * rest, *no_gradients(Options, Wanted)


mamba3_block_op = define(
    f"mamba3_block({signature(Inputs, Options, Wanted)}) -> "
    "(Tensor out, Tensor final_angle, Tensor final_ssm, Tensor final_k, Tensor final_v)",
    _forward,
    _forward_fake,
    autograd=_Mamba3Block,
    called=NAME,
    planned=(),
)
