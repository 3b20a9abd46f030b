"""One decoding step of a Mamba-3 layer: norms, rotation, state, gate and output norm in one native call."""

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import call, define, reference, signature, unpack, unpack_traced, wrote_in_place
from mamba_ssm.ops.mamba3_block.arguments import (
    NAME,
    STATE_NAMES,
    Inputs,
    Options,
    check,
    fill,
    kernel_layout,
    out_shape,
)
from mamba_ssm.ops.mamba3_block.reference import mamba3_block_step_ref
from mamba_ssm.ops.mamba3_scan import States


def mamba3_block_step(
    zxBCdt: torch.Tensor,
    states: States,
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
    ngroups: int = 1,
    A_floor: float = 1e-4,
    A_softplus: bool = False,
    B_eps: float = 1e-5,
    C_eps: float = 1e-5,
    norm_eps: float = 1e-5,
    gate: bool = True,
    pairwise: bool = True,
) -> torch.Tensor:
    """What a Mamba-3 layer does with one token between in_proj and out_proj; writes the new states into states.

    Args (float32, float16 or bfloat16 each):
        zxBCdt: (B, 2 H P + 2 R G N + 3 H + S), in_proj's output: z, x, B, C, dt, A, trap and angles.
        states: angle (B, H, S), which is float32, ssm (B, H, P, N), k (B, R, H, N) and v (B, H, P).
        dt_bias: (H). dt is softplus(dt + dt_bias). -A is 1 + A from 0 on and 1 / (1 - A) below, or with A_softplus
            softplus(A), and at least A_floor.
        B_weight, C_weight: (N), of the norms of B and C, with B_eps and C_eps. B_bias, C_bias: (H, R, N). D: (H).
        mimo_x, mimo_z, mimo_o: (H, R, P), of x, z and the output's rows; None is ones, for mimo_o the rows themselves.
        norm_weight: (H P), for an RMSNorm over each head before the gate; None for none.
        gate: whether the rows are multiplied by silu(z mimo_z).
        pairwise: an angle turns neighbours of B and C (SISO), not entries N / 2 apart (MIMO).

    Returns:
        (B, H, P) of zxBCdt's dtype, without mimo_o (B, R, H, P). No gradient is recorded.
    """
    parameters = dt_bias, B_weight, C_weight, B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, norm_weight
    if reference.on:
        options = ngroups, A_floor, A_softplus, B_eps, C_eps, norm_eps, gate, pairwise
        return mamba3_block_step_ref(zxBCdt, states, *parameters, *options)
    numbers = float(B_eps), float(C_eps), float(norm_eps)
    options = ngroups, float(A_floor), bool(A_softplus), *numbers, bool(gate), bool(pairwise)
    return call(mamba3_block_step_op, zxBCdt, *states, *parameters, *options)


def _step(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    sizes = check(inputs, options)
    out = inputs.zxBCdt.new_empty(out_shape(sizes, inputs))
    if out.numel() == 0:
        return out
    states = [getattr(inputs, name) for name in STATE_NAMES]
    dense = [checks.contiguous(state) for state in states]
    params = abi.MambaMamba3Step()
    functions = place(params, out)
    inputs = kernel_layout(inputs)  # held until the call is made
    fill(params, sizes, inputs, options, dense, out)
    run(functions, "mamba3_step", params)
    for state, written in zip(states, dense, strict=True):
        if written is not state:
            state.copy_(written)
        wrote_in_place(state)
    return out


def _step_fake(*arguments):
    inputs, options = unpack_traced(arguments, Inputs, Options)
    return inputs.zxBCdt.new_empty(out_shape(check(inputs, options), inputs))


mamba3_block_step_op = define(
    f"{NAME}({signature(Inputs, Options, written=STATE_NAMES)}) -> Tensor",
    _step,
    _step_fake,
    differentiable=False,
    planned=(),
)
