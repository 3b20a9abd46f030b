"""One decoding step of a Mamba layer: convolution, x_proj, dt_proj and state in one native call."""

import torch

from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import call, define, make, reference, signature, wrote_in_place
from mamba_ssm.ops._shared.spec import fill
from mamba_ssm.ops.mamba_step.arguments import NAME, SPEC, Inputs, Results, check
from mamba_ssm.ops.mamba_step.reference import mamba_step_ref


def mamba_step(
    xz: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    dt_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    D: torch.Tensor,
    x_proj_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a Mamba layer does with one token between in_proj and out_proj; writes the new states into both states.

    Args (float32, float16 or bfloat16 each):
        xz: (B, 2 D), in_proj's output: x and z.
        conv_state: (B, D, S) with S >= W-1, the last inputs of the convolution, newest last.
        ssm_state: (B, D, N).
        conv1d_weight: (D, W), W 2..4, and conv1d_bias: (D), or None; silu follows.
        x_proj_weight: (R + 2 N, D) and dt_proj_weight: (D, R), of xz's dtype.
        dt_bias: (D), dt_proj's bias, or None. A_log: (D, N), where A is -exp(A_log). D: (D).
        x_proj_scales: None, or (R + 2 N, ceil(D / 32)) float16 for an int8 x_proj_weight, as for linear.

    Returns:
        (B, D) of xz's dtype. There is no gradient: the result and the new states are detached,
        and a warning says so where an input requires one and grad mode is on.
    """
    tensors = (
        *(xz, conv_state, ssm_state, conv1d_weight, conv1d_bias, x_proj_weight, dt_proj_weight, dt_bias, A_log, D),
        x_proj_scales,
    )
    if reference.on:
        return mamba_step_ref(*tensors)
    return call(mamba_step_op, *tensors)


def _step(*arguments):
    inputs = make(Inputs, arguments)
    sizes, xz = check(inputs), inputs.xz
    out = xz.new_empty(sizes.batch, sizes.dim)
    if out.numel() == 0:
        return out
    params = abi.MambaMambaStep()
    functions = place(params, out)
    inputs = SPEC.layout(inputs)  # held until the call is made
    fill(params, sizes, inputs, Results(out))
    workspace = xz.new_empty(functions["mamba_step_workspace"](params), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    run(functions, NAME, params)
    wrote_in_place(inputs.conv_state)
    wrote_in_place(inputs.ssm_state)
    return out


def _step_fake(*arguments):
    inputs = Inputs(*arguments)
    sizes = check(inputs)
    return inputs.xz.new_empty(sizes.batch, sizes.dim)


mamba_step_op = define(
    f"{NAME}({signature(Inputs, written=['conv_state', 'ssm_state'])}) -> Tensor",
    _step,
    _step_fake,
    differentiable=False,
    planned=(),
)
