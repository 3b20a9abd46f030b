"""A scan whose sequence lies on several devices: first what this part passes on, then the part from the right state.

What a part passes on is its state after the last step if it starts from zero, and the product of all decays; backward,
the gradient of the state before its first step if none comes from later parts. On CUDA the second call goes on from
what the first one found for its segments of the length, as a call by itself does, so that little is computed twice.
"""

import math
import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import use_deterministic_mode
from mamba_ssm.ops.carry import pass_on
from mamba_ssm.ops.selective_scan.arguments import Inputs, Options, allocate_out, check, fill, kernel_layout, plan_of
from mamba_ssm.ops.selective_scan.backward import Kept, Wanted, of_inputs, run_backward
from mamba_ssm.ops.selective_scan.forward import Results, launch_forward


class Carry(typing.NamedTuple):
    """What a part passes on."""

    state: torch.Tensor  # (B, D, N) float32, or its gradient
    factor: torch.Tensor  # (B, D, N) float32
    segments: int  # of the length, whose states and factors the second call finds in the workspace
    workspace: torch.Tensor | None  # None of no steps


def scan_carry(inputs: Inputs, options: Options, dout: torch.Tensor | None = None) -> Carry:
    """Forward, or with dout backward. initial_state is not read; seq_idx must be None."""
    sizes, inputs = check(inputs), kernel_layout(inputs)
    A = inputs.A
    if inputs.u.numel() == 0:
        return Carry(A.new_zeros(sizes.state), A.new_ones(sizes.state), 0, None)
    params = abi.MambaSelectiveScanBackward()
    functions = place(params, A)
    fill(params, sizes, inputs, options, None, None)
    plan = plan_of(functions, params.forward, use_deterministic_mode())
    params.segments = segments = plan.backward_segments
    shape = segments, 2, *sizes.state
    count = math.prod(shape)  # of the floats that come first in backward's workspace
    workspace = A.new_empty(count if dout is None else max(count, plan.backward_workspace // 4))
    params.workspace = workspace.data_ptr()
    states, factors = workspace[:count].view(shape).unbind(1)
    if dout is None:
        run(functions, "selective_scan_forward_carry", params.forward)
        return Carry(*pass_on(states, factors), segments, workspace)
    dout = checks.unit_last_stride(dout)
    params.dout = dout.data_ptr()
    params.dout_batch_stride, params.dout_dim_stride, _ = dout.stride()
    run(functions, "selective_scan_backward_carry", params)
    return Carry(*pass_on(states.flip(0), factors.flip(0)), segments, workspace)


def carried_forward(inputs: Inputs, options: Options, carry: Carry) -> tuple[torch.Tensor, torch.Tensor]:
    """The part's output, and checkpoints for carried_backward."""
    sizes, inputs = check(inputs), kernel_layout(inputs)
    results = Results(allocate_out(inputs.u), None, inputs.A.new_empty((sizes.checkpoints,)))
    if inputs.u.numel():
        launch_forward(sizes, inputs, options, results, carry)
    return results.out, typing.cast(torch.Tensor, results.checkpoints)


def carried_backward(
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    inputs: Inputs,
    checkpoints: torch.Tensor,
    options: Options,
    carry: Carry,
) -> Inputs:
    """The gradients of inputs; dlast_state is what comes from later parts. That of initial_state is none of them."""
    wanted = Wanted(need_dinitial_state=False, recompute_out=False)
    kept = Kept(checkpoints)
    return of_inputs(run_backward(check(inputs), dout, dlast_state, inputs, kept, options, wanted, carry.workspace))
