"""The decode step's arguments as records, their checks, and the kernels' parameters.

Letters: B batch, T steps, H heads, P headdim (or D channels without heads), G groups of B and C, N dstate.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec
from mamba_ssm.ops._shared.spec import fill as fill_fields

NAME = "selective_state_update"


class Inputs(typing.NamedTuple):
    """The tensors that the operator takes, in their order; state is written in place."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    state_batch_indices: torch.Tensor | None


class Destinations(typing.NamedTuple):
    """Where states go that do not stay where they were; the second is written in place."""

    dst_state_batch_indices: torch.Tensor | None
    intermediate_states_buffer: torch.Tensor | None


class Options(typing.NamedTuple):
    """What else the operator takes."""

    dt_softplus: bool


class Sizes(typing.NamedTuple):
    """Without heads nheads and ngroups are 1, and headdim is D; without steps seqlen is 1."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int


def _kind(heads, several):
    """(Inputs, the result and the buffer as records, the Inputs' Spec) for states with heads or without, and for one
    step or several.
    """
    step, steps = ("B, T, ", "batch len ") if several else ("B, ", "batch ")
    channels, dims = ("H, P", "head dim") if heads else ("D", "dim")
    group, groups = ("G, N", "group dstate") if heads else ("N", "dstate")
    args = {
        "state": Arg("float", f"B, {channels}, N", f"row {dims} dstate", code="state_dtype"),
        "x": Arg("activation", step + channels, steps + dims, code="x_dtype"),
        "dt": Arg("float", step + channels, steps + dims, code="dt_dtype"),
        "A": Arg("float", f"{channels}, N", f"{dims} dstate", code="A_dtype"),
        "B": Arg("float", step + group, steps + groups, code="BC_dtype"),
        "C": Arg("", step + group, steps + groups),
        "D": Arg("float", channels, dims, code="D_dtype"),
        "z": Arg("same", step + channels, steps + dims),
        "dt_bias": Arg("float", channels, dims, code="dt_bias_dtype"),
        "state_batch_indices": Arg("index", "B"),
        # Of Destinations, and the result.
        "intermediate_states_buffer": Arg("same", f"B, T, {channels}, N", f"batch len {dims} dstate", "step_states"),
        "out": Arg("", step + channels, steps + dims),
    }

    hints = typing.get_type_hints(Inputs) | typing.get_type_hints(Destinations) | {"out": torch.Tensor}

    def record(*names):
        return typing.NamedTuple("Tensors", [(name, Annotated[hints[name], args[name]]) for name in names])

    inputs = record(*Inputs._fields)
    return inputs, record("out", "intermediate_states_buffer"), Spec(NAME, inputs)


_KINDS = {(heads, several): _kind(heads, several) for heads in (False, True) for several in (False, True)}


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    state, x, A, B = inputs.state, inputs.x, inputs.A, inputs.B
    heads, several = state.dim() == 4, x.dim() == state.dim()
    *_, spec = _KINDS[heads, several]
    letters = {field.name: field.first.letters for field in spec.tensors}
    checks.check_activation_dtype(NAME, "x", x)
    checks.check_dims(NAME, "state", state, 3 + heads, "(B, D, N), or 4 dimensions (B, H, P, N)")
    if x.dim() != 2 + heads + several:
        checks.check_dims(NAME, "x", x, 2 + heads, f"{letters['x']} with a state {letters['state']}")
    if several and x.shape[1] < 1:
        raise ValueError(f"{NAME}: x must have at least one step T of {letters['x']}, got shape {tuple(x.shape)}")
    sizes = dict(zip(("B", "T") if several else "B", x.shape, strict=False))
    sizes |= dict(zip(("H", "P") if heads else "D", x.shape[1 + several :], strict=True))
    channels, dstate = x.shape[1 + several :], state.shape[-1]
    if A.shape != (*channels, dstate) and A.shape[-1:] == B.shape[-1:]:  # two against one: the state is to blame
        dstate = A.shape[-1]
    checks.no_complex(NAME, "A", A)
    sizes["N"] = dstate
    spec.check(inputs, sizes, ("A",), like=x, like_name="x")
    checks.check_dstate(NAME, dstate, abi.MAX_DSTATE)
    rows = x.shape[0] if inputs.state_batch_indices is None else state.shape[0]
    spec.check(inputs, sizes | {"B": rows}, ("state",), like=x, like_name="x")
    checks.check_writable(NAME, "state", state)
    (nheads, headdim), ngroups = channels if heads else (1, *channels), 1
    if heads:
        checks.check_dims(NAME, "B", B, 3 + several, letters["B"])
        ngroups = sizes["G"] = B.shape[-2]
        checks.check_groups(NAME, f"nheads ({nheads})", nheads, ngroups)
    spec.check(inputs, sizes, ("dt", "B"), like=x, like_name="x")
    checks.check_same(NAME, "C", inputs.C, B.shape, B, "B", letters["B"])
    spec.check(inputs, sizes, ("D", "z", "dt_bias", "state_batch_indices"), like=x, like_name="x")
    return make(Sizes, (x.shape[0], sizes.get("T", 1), nheads, headdim, dstate, ngroups))


def check_destinations(sizes, inputs, destinations):
    """Raises on any of the destinations that the kernels do not take."""
    rows, buffer = destinations
    if rows is not None:
        checks.check_index(NAME, "dst_state_batch_indices", rows, (sizes.batch,), inputs.x, "x", "(B,)")
    if buffer is not None:
        shape = sizes.batch, sizes.seqlen, *inputs.state.shape[1:]
        letters = "(B, T, H, P, N)" if inputs.state.dim() == 4 else "(B, T, D, N)"
        checks.check_same(NAME, "intermediate_states_buffer", buffer, shape, inputs.state, "state", letters)
        checks.check_writable(NAME, "intermediate_states_buffer", buffer)


def fill(params, sizes, inputs, options, out, buffer):
    """Sets all fields but the run's and the indices'. Without heads the strides of heads stay 0."""
    state, x = inputs.state, inputs.x
    tensors, written, _ = _KINDS[state.dim() == 4, x.dim() == state.dim()]
    fill_fields(params, sizes, options, make(tensors, (*inputs[:-1], None)), make(written, (out, buffer)))
    params.state_rows = state.shape[0]
