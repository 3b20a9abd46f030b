"""The operator of the selective scan's second derivative: tangents of the scan's results and gradients, from tangents
of its inputs and of the output's gradient (see second_backward.py).

The scan here is what lies between softplus and gate: delta as the states use it, B and C (B, G, N, L), all float32.
Letters: B batch, D channels, L length, N dstate, G groups of B and C.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import define, returns, signature, unpack, use_deterministic_mode
from mamba_ssm.ops._shared.spec import Arg, Spec, fill
from mamba_ssm.ops.selective_scan.arguments import check_fake, plan_of
from mamba_ssm.ops.selective_scan.double_blocks import in_blocks

_NAME = "selective_scan_double_backward"
_CHANNELS, _MATRIX, _STATE = Arg("float32", "B, D, L"), Arg("float32", "B, G, N, L"), Arg("float32", "B, D, N")
_RATES = Arg("float32", "D, N")


class Given(typing.NamedTuple):
    """The scan's inputs, the gradients of its results, and tangents. None: zero."""

    u: Annotated[torch.Tensor, _CHANNELS._replace(strides="batch dim -")]
    delta: Annotated[torch.Tensor, _CHANNELS._replace(strides="batch dim -")]
    A: Annotated[torch.Tensor, _RATES]
    B: Annotated[torch.Tensor, _MATRIX._replace(strides="batch group dstate -")]
    C: Annotated[torch.Tensor, _MATRIX._replace(strides="batch group dstate -")]
    initial_state: Annotated[torch.Tensor | None, _STATE]
    seq_idx: Annotated[torch.Tensor | None, Arg("int32", "B, L")]
    dout: Annotated[torch.Tensor, _CHANNELS]
    dlast_state: Annotated[torch.Tensor | None, _STATE]
    u_tangent: Annotated[torch.Tensor, _CHANNELS]
    delta_tangent: Annotated[torch.Tensor, _CHANNELS]
    A_tangent: Annotated[torch.Tensor, _RATES]
    B_tangent: Annotated[torch.Tensor, _MATRIX]
    C_tangent: Annotated[torch.Tensor, _MATRIX]
    initial_state_tangent: Annotated[torch.Tensor | None, _STATE]
    dout_tangent: Annotated[torch.Tensor, _CHANNELS]


class Tangents(typing.NamedTuple):
    """Of results and gradients; beside them the output and delta's gradient themselves."""

    out: Annotated[torch.Tensor, _CHANNELS._replace(strides="batch dim -")]
    ddelta: Annotated[torch.Tensor, _CHANNELS]
    out_tangent: Annotated[torch.Tensor, _CHANNELS]
    last_state_tangent: Annotated[torch.Tensor, _STATE]
    du_tangent: Annotated[torch.Tensor, _CHANNELS]
    ddelta_tangent: Annotated[torch.Tensor, _CHANNELS]
    dA_tangent: Annotated[torch.Tensor, Arg("", "D, N | B, D, N")]
    dB_tangent: Annotated[torch.Tensor, Arg("", "B, G, N, L | S, B, G, N, L")]
    dC_tangent: Annotated[torch.Tensor, Arg("", "B, G, N, L | S, B, G, N, L")]
    dinitial_state_tangent: Annotated[torch.Tensor, _STATE]


class Options(typing.NamedTuple):
    reverse: bool


class _Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    dstate: int
    ngroups: int


_SPEC = Spec(_NAME, Given)


def _check(given):
    sizes = _SPEC.bind(given)
    checks.check_dstate(_NAME, sizes["N"], abi.MAX_DSTATE)
    _SPEC.check(given, sizes)
    checks.check_groups(_NAME, "dim (channels of u)", sizes["D"], sizes["G"])
    return _Sizes(sizes["B"], sizes["D"], sizes["L"], sizes["N"], sizes["G"])


def _allocate(given, sizes):
    lines = [torch.empty_like(given.u, memory_format=torch.contiguous_format) for _ in range(5)]
    state = given.A.new_empty((sizes.batch, sizes.dim, sizes.dstate))
    A, B, C = (torch.empty_like(of, memory_format=torch.contiguous_format) for of in (given.A, given.B, given.C))
    out, ddelta, out_tangent, du_tangent, ddelta_tangent = lines
    return Tangents(out, ddelta, out_tangent, state, du_tangent, ddelta_tangent, A, B, C, torch.empty_like(state))


def _double_backward(*arguments):
    given, options = unpack(arguments, Given, Options)
    sizes = _check(given)
    found = _allocate(given, sizes)
    if given.u.numel() == 0:  # the gradient of the initial state is dlast_state, and has no tangent
        for tangent in found:
            tangent.zero_()
        if given.initial_state_tangent is not None:
            found.last_state_tangent.copy_(given.initial_state_tangent)
    elif given.u.is_cuda:
        in_blocks(given, found, options.reverse)
    else:
        on_cpu(given, found, sizes, options.reverse)
    return found


def on_cpu(given, found, sizes, reverse):
    """Writes found by the kernel."""
    given = _SPEC.layout(given)
    params = abi.MambaSelectiveScanDoubleBackward()
    functions = place(params, given.A)
    fill(params, sizes, given)
    params.variable_B = params.variable_C = params.segments = 1
    params.reverse = reverse
    params.slots = plan_of(functions, params.forward, use_deterministic_mode()).slots
    parts = found._replace(
        dA_tangent=given.A.new_empty((sizes.batch, *given.A.shape)),
        dB_tangent=given.B.new_zeros((params.slots, *given.B.shape)),
        dC_tangent=given.C.new_zeros((params.slots, *given.C.shape)),
    )
    fill(params, parts)
    run(functions, _NAME, params)
    for name in ("dA_tangent", "dB_tangent", "dC_tangent"):
        torch.sum(getattr(parts, name), 0, out=getattr(found, name))


def _fake(*arguments):
    given, _ = unpack(arguments, Given, Options)
    sizes = _check(given)
    check_fake(_NAME, given)
    return _allocate(given, sizes)


double_backward_op = define(
    f"{_NAME}({signature(Given, Options)}) -> {returns(Tangents)}",
    _double_backward,
    _fake,
)
