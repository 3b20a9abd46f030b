"""One decoding step of a Mamba-2 layer: convolution, state and gated norm in one native call."""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import call, define, reference, signature, unpack, unpack_traced, wrote_in_place
from mamba_ssm.ops.mamba2_step.arguments import NAME, SPEC, Inputs, Options, check, fill
from mamba_ssm.ops.mamba2_step.reference import mamba2_step_ref


def mamba2_step(
    zxbcdt: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    rmsnorm_weight: torch.Tensor | None = None,
    ngroups: int = 1,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    gate: bool = True,
    rmsnorm_eps: float = 1e-5,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    """What a Mamba-2 layer does with one token between in_proj and out_proj; writes the new states into both states.

    Args (float32, float16 or bfloat16 each):
        zxbcdt: (B, 2 H P + 2 G N + H), in_proj's output: z, x, B, C and dt.
        conv_state: (B, H P + 2 G N, S) with S >= W-1, the last inputs of the convolution, newest last.
        ssm_state: (B, H, P, N).
        conv1d_weight: (H P + 2 G N, W), W 2..4, and conv1d_bias: (H P + 2 G N), or None; silu follows.
        dt_bias, A_log: (H). dt is softplus(dt + dt_bias), clamped to dt_limit; A is -exp(A_log). D: (H) or (H, P).
        rmsnorm_weight: (H P), for the gated RMSNorm over groups of H P / G channels; None for none.
        gate: without rmsnorm_weight, whether the output is multiplied by silu(z).

    Returns:
        (B, H P) of zxbcdt's dtype. There is no gradient: the result and the new states are detached,
        and a warning says so where an input requires one and grad mode is on.
    """
    tensors = zxbcdt, conv_state, ssm_state, conv1d_weight, conv1d_bias, dt_bias, A_log, D, rmsnorm_weight
    if reference.on:
        return mamba2_step_ref(*tensors, ngroups, dt_limit, gate, rmsnorm_eps, norm_before_gate)
    dt_min, dt_max = dt_limit
    options = ngroups, float(dt_min), float(dt_max), gate, rmsnorm_eps, norm_before_gate
    return call(mamba2_step_op, *tensors, *options)


def _step(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    sizes = check(inputs, options)
    out = inputs.zxbcdt.new_empty(sizes.batch, sizes.nheads * sizes.headdim)
    if out.numel() == 0:
        return out
    params = abi.MambaMamba2Step()
    functions = place(params, out)
    inputs = SPEC.layout(inputs)  # held until the call is made
    fill(params, sizes, inputs, options, out)
    run(functions, NAME, params)
    wrote_in_place(inputs.conv_state)
    wrote_in_place(inputs.ssm_state)
    return out


def _step_fake(*arguments):
    inputs, options = unpack_traced(arguments, Inputs, Options)
    sizes = check(inputs, options)
    return inputs.zxbcdt.new_empty(sizes.batch, sizes.nheads * sizes.headdim)


mamba2_step_op = define(
    f"{NAME}({signature(Inputs, Options, written=['conv_state', 'ssm_state'])}) -> Tensor",
    _step,
    _step_fake,
    differentiable=False,
    planned=(),
)
