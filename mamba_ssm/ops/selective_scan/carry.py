"""A scan whose sequence lies on several devices: first what this part passes on, then the part from the right state.

What a part passes on is its state after the last step if it starts from zero, and the product of all decays; backward,
the gradient of the state before its first step if none comes from later parts. On CUDA the second call reuses what the
first one computed for its segments of the length, so that little is computed twice.
"""

import math
import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import use_deterministic_mode
from mamba_ssm.ops._shared.spec import fill as fill_fields
from mamba_ssm.ops.carry import nothing_passed_on, passed_on
from mamba_ssm.ops.selective_scan.arguments import (
    Incoming,
    Inputs,
    Options,
    Results,
    allocate_out,
    check,
    fill,
    kernel_layout,
    plan_of,
)
from mamba_ssm.ops.selective_scan.backward import Kept, Wanted, of_inputs, run_backward
from mamba_ssm.ops.selective_scan.forward import launch_forward


class Carry(typing.NamedTuple):
    """What a part passes on."""

    passed_on: torch.Tensor  # as ops/carry.py has it: each element of a state, or of its gradient, has its own factor
    shape: torch.Size  # of such a state
    segments: int  # of the length, whose states and factors the second call finds in the workspace
    workspace: torch.Tensor | None  # None of no steps


def shape_of(sizes: typing.Any) -> torch.Size:
    """Of a state, (B, D N), as ops/carry.py takes it."""
    return torch.Size((sizes.batch, sizes.dim * sizes.dstate))


def scan_carry(inputs: Inputs, options: Options, dout: torch.Tensor | None = None) -> Carry:
    """Forward, or with dout backward. initial_state is not read; seq_idx must be None."""
    dout = None if dout is None else checks.unit_last_stride(dout)
    return launch_carry(check(inputs), kernel_layout(inputs), options, dout)


def launch_carry(sizes: typing.Any, inputs: typing.Any, options: Options, dout: typing.Any = None) -> Carry:
    """scan_carry on arguments that were checked, in kernel layout; all but parameters may be Views."""
    A, shape = inputs.A, shape_of(sizes)
    if sizes.seqlen == 0 or shape.numel() == 0:
        return Carry(nothing_passed_on(shape, A), shape, 0, None)
    params = abi.MambaSelectiveScanBackward()
    functions = place(params, A)
    fill(params, sizes, options, inputs)
    params.carried = True  # as the call will be for which this is the plan
    plan = plan_of(functions, params.forward, use_deterministic_mode())
    params.carried = False
    segments = plan.forward_segments if dout is None else plan.backward_segments
    params.segments = segments
    each = segments, 2, *shape
    count = math.prod(each)  # of the floats that come first in backward's workspace
    workspace = A.new_empty(count if dout is None else max(count, plan.backward_workspace // 4))
    params.workspace = workspace.data_ptr()
    if dout is None:
        run(functions, "selective_scan_forward_carry", params.forward)
    else:
        fill_fields(params, Incoming(dout, None))
        run(functions, "selective_scan_backward_carry", params)
    states, factors = workspace[:count].view(each).transpose(0, 2).unbind(1)
    return Carry(passed_on(states[..., None], factors, from_end=dout is not None), shape, segments, workspace)


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
