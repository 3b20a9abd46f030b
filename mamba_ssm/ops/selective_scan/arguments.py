"""What the operators of the selective scan share: their arguments as records, checks, memory layout and parameters.

Letters: B batch, D channels, L length, N dstate, G groups of B and C.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import ask
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec
from mamba_ssm.ops._shared.spec import fill as fill_fields

NAME = "selective_scan"  # what errors call the operators
_CHANNELS = Arg("same", "B, D, L", "batch dim -")
_MATRIX = Arg("", "B, G, N, L | B, N, L | D, N", "batch group dstate - | batch dstate - | ")
_STATE = Arg("float32", "B, D, N")


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    u: Annotated[torch.Tensor, _CHANNELS._replace(dtype="activation", code="dtype")]
    delta: Annotated[torch.Tensor, _CHANNELS]
    A: Annotated[torch.Tensor, Arg("float32", "D, N")]
    B: Annotated[torch.Tensor, _MATRIX]
    C: Annotated[torch.Tensor, _MATRIX]
    D: Annotated[torch.Tensor | None, Arg("float32", "D")]
    z: Annotated[torch.Tensor | None, _CHANNELS]
    delta_bias: Annotated[torch.Tensor | None, Arg("float32", "D")]
    initial_state: Annotated[torch.Tensor | None, _STATE]
    seq_idx: Annotated[torch.Tensor | None, Arg("int32", "B, L")]


class Results(typing.NamedTuple):
    """Forward's results, None where not wanted."""

    out: Annotated[torch.Tensor, _CHANNELS]
    last_state: Annotated[torch.Tensor | None, _STATE]
    checkpoints: Annotated[torch.Tensor | None, Arg("", "S")]  # a state every 64 steps, for backward


class Incoming(typing.NamedTuple):
    """The gradients that backward starts from."""

    dout: Annotated[torch.Tensor, _CHANNELS]
    dlast_state: Annotated[torch.Tensor | None, _STATE]


class Gradients(typing.NamedTuple):
    """Backward's results, None for those of absent inputs; with recompute_out also forward's out."""

    du: Annotated[torch.Tensor, _CHANNELS]
    ddelta: Annotated[torch.Tensor, _CHANNELS]
    dA: Annotated[torch.Tensor, Arg("", "D, N")]
    dB: Annotated[torch.Tensor, _MATRIX]
    dC: Annotated[torch.Tensor, _MATRIX]
    dD: Annotated[torch.Tensor | None, Arg("", "D")]
    dz: Annotated[torch.Tensor | None, _CHANNELS]
    ddelta_bias: Annotated[torch.Tensor | None, Arg("", "D")]
    dinitial_state: Annotated[torch.Tensor | None, _STATE]
    out: Annotated[torch.Tensor | None, _CHANNELS]


class Options(typing.NamedTuple):
    """What else all of the operators take."""

    delta_softplus: bool
    reverse: bool = False  # the scan goes from the last step to the first


class Sizes(typing.NamedTuple):
    batch: int
    dim: int
    seqlen: int
    dstate: int
    ngroups: int

    @property
    def state(self):
        """Shape of the states before or after a step."""
        return self.batch, self.dim, self.dstate

    @property
    def checkpoints(self):
        """Floats to allocate for the states that the forward scan stores for the backward scan: (B, (L-1)//64, D, N),
        flat. Two more than that, of no value, since compilers specialise graphs on sizes of 0 and 1, that is on short
        sequences.
        """
        count = (self.seqlen - 1) // abi.SCAN_CHECKPOINT if self.seqlen > 0 else 0
        return self.batch * count * self.dim * self.dstate + 2


_SPEC = Spec(NAME, Inputs)


def check(inputs):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    sizes, u = _SPEC.bind(inputs), inputs.u
    checks.no_complex(NAME, "A", inputs.A)
    (batch, dim, seqlen), dstate, ngroups = u.shape, sizes["N"], 1
    checks.check_dstate(NAME, dstate, abi.MAX_DSTATE)
    _SPEC.check(inputs, sizes)
    for matrix in (inputs.C, inputs.B):
        if matrix.dim() == 4:
            ngroups = matrix.shape[1]
    checks.check_groups(NAME, "dim (channels of u)", dim, ngroups)
    for name, matrix in (("B", inputs.B), ("C", inputs.C)):
        check_matrix(NAME, name, matrix, (batch, ngroups, dstate, seqlen), u, "u", dim)
    return make(Sizes, (batch, dim, seqlen, dstate, ngroups))


def check_parameters(op, shape_of_A, like, like_name, inputs):
    """A (D, N), D and delta_bias (D), also of operators whose other inputs are others; like: an activation."""
    if inputs.A.shape != shape_of_A or inputs.A.dtype != torch.float32:
        checks.no_complex(op, "A", inputs.A)
        checks.check_dims(op, "A", inputs.A, 2, "(D, N)")
    dim, dstate = shape_of_A
    _SPEC.check(inputs, {"D": dim, "N": dstate}, ("A", "D", "delta_bias"), op, like, like_name)
    checks.check_dstate(op, dstate, abi.MAX_DSTATE)


def check_fake(op, *records):
    """For fakes, beside check: a meta tensor has the device number of a CPU tensor, and never reaches a kernel."""
    first, like = records[0]._fields[0], records[0][0]
    for record in records:
        for name, tensor in record._asdict().items():
            if tensor is not None and tensor.device != like.device:
                raise ValueError(f"{op}: {name} must be on {like.device} like {first}, got {tensor.device}")


def check_matrix(op, name, matrix, shape, like, like_name, dim):
    """B or C: (B, G, N, L), or without G where there is one group, or constant (D, N)."""
    dims = matrix.dim()
    letters = "(B, G, N, L)"
    if dims == 3 and shape[1] == 1:
        shape, letters = (shape[0], *shape[2:]), "(B, N, L)"
    elif dims == 2:
        checks.check_float32(op, name, matrix, (dim, shape[2]), like, like_name, "(D, N) as a constant")
        return
    elif dims not in (3, 4):
        raise ValueError(
            f"{op}: {name} must be (B, G, N, L), (B, N, L), or constant (D, N), got shape {tuple(matrix.shape)}"
        )
    if matrix.shape != shape or matrix.dtype != like.dtype or matrix.get_device() != like.get_device():
        checks.check_same(op, name, matrix, shape, like, like_name, letters)


def kernel_layout(inputs):
    """The same tensors in the layout that the kernels take."""
    return _SPEC.layout(inputs)


def fill(params, sizes, options, inputs, *records):
    """Sets the fields of the inputs and other records, of tensors (or Views) in kernel layout."""
    fill_fields(params, sizes, options, inputs, *records)
    params.variable_B, params.variable_C = inputs.B.dim() > 2, inputs.C.dim() > 2


def plan_of(functions, params, deterministic):
    """How the library wants to run this problem."""
    plan = abi.MambaSelectiveScanPlan()
    ask(functions, "selective_scan_plan", params, deterministic, plan)
    return plan


def segments_of(functions, params):
    """How many parts forward should split the length into."""
    short = params.seqlen <= abi.SCAN_CHECKPOINT  # never worth it
    return 1 if short else plan_of(functions, params, False).forward_segments


def split_length(params, segments, A, carry=None):
    """Sets how many parts forward splits the length into; returns the memory in which these pass on their states.
    carry: what they have passed on already (see carry.py), which says itself how many.
    """
    if carry is not None:
        params.segments, params.carried, params.workspace = carry.segments, True, carry.workspace.data_ptr()
        return carry.workspace
    params.segments = segments
    if segments == 1:
        return None
    workspace = A.new_empty((segments, 2, params.batch, params.dim, params.dstate))
    params.workspace = workspace.data_ptr()
    return workspace


def allocate_out(u):
    """Memory for the scan's output, in u's layout if that is dense."""
    out = torch.empty_like(u)
    if out.stride(-1) != 1 and u.shape[-1] > 1:  # u was neither dense nor contiguous
        out = u.new_empty(u.shape)
    return out
