"""The operator that gives the states after each of several packed sequences, and the checks of cu_seqlens.

Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, signature, unpack
from mamba_ssm.ops.ssd.arguments import NAME, Inputs, Options, allocate_workspace, check, fill, kernel_layout


class VarlenInputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order. x has batch 1."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None  # of the first sequence
    cu_seqlens: torch.Tensor


class ForwardOptions(typing.NamedTuple):
    """Options, but for reverse: these states are those of scans forwards in time."""

    dt_softplus: bool
    dt_min: float
    dt_max: float


def check_cu_seqlens(x, cu_seqlens):
    """All but the values, which would have to be fetched from a GPU."""
    checks.check_tensor(NAME, "cu_seqlens", cu_seqlens)
    checks.check_dims(NAME, "x", x, 4, "(B, L, H, P)")
    if x.shape[0] != 1:
        raise ValueError(
            f"{NAME}: cu_seqlens is for sequences packed in one row: x must have batch 1, got {x.shape[0]}"
        )
    checks.check_dims(NAME, "cu_seqlens", cu_seqlens, 1, "(sequences + 1,)")
    sequences = max(cu_seqlens.shape[0] - 1, 0)
    checks.check_int32(NAME, "cu_seqlens", cu_seqlens, (sequences + 1,), x, "x", "(sequences + 1,)")


def _scan_of(inputs, initial_states):
    """The scan's inputs; these states are no function of D and z."""
    x, dt, A, B, C = inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C
    return Inputs(x, dt, A, B, C, None, None, inputs.dt_bias, initial_states, None)


def _check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes, with a row for each sequence."""
    check_cu_seqlens(inputs.x, inputs.cu_seqlens)
    sizes = check(_scan_of(inputs, inputs.initial_states), options)
    return sizes._replace(batch=inputs.cu_seqlens.shape[0] - 1)


def _varlen_states(*arguments):
    inputs, options = unpack(arguments, VarlenInputs, ForwardOptions)
    options = Options(*options)
    sizes = _check(inputs, options)
    x, A, initial_states = inputs.x, inputs.A, inputs.initial_states
    states = A.new_empty(sizes.states)
    if initial_states is not None:  # zeros for the other sequences
        initial_states = torch.cat([initial_states, A.new_zeros(sizes.states)])[: sizes.batch]
    if states.numel() == 0 or x.numel() == 0:
        return states.zero_() if initial_states is None else states.copy_(initial_states)
    params = abi.MambaSsd()
    functions = place(params, x)
    scan = kernel_layout(_scan_of(inputs, initial_states))
    fill(params, sizes, options, scan)
    cu_seqlens = inputs.cu_seqlens.contiguous()
    params.cu_seqlens = cu_seqlens.data_ptr()
    params.final_state = states.data_ptr()
    workspace = allocate_workspace(functions["ssd_forward_workspace"], params, x)
    run(functions, "ssd_forward", params)
    del scan, workspace  # held until here: the kernels have them now
    return states


def _varlen_states_fake(*arguments):
    inputs, options = unpack(arguments, VarlenInputs, ForwardOptions)
    return inputs.A.new_empty(_check(inputs, Options(*options)).states)


ssd_varlen_states_op = define(
    f"ssd_varlen_states({signature(VarlenInputs, ForwardOptions)}) -> Tensor",
    _varlen_states,
    _varlen_states_fake,
    called=NAME,
    planned=(),
)
