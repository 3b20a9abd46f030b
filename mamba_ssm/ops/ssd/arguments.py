"""What the operators of Mamba-2's scan share: their arguments as records, checks, memory layout and parameters.

Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing
from typing import Annotated

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_range
from mamba_ssm._native import abi
from mamba_ssm._torch import make
from mamba_ssm.ops._shared.spec import Arg, Spec, backwards_in_time
from mamba_ssm.ops._shared.spec import fill as fill_fields

NAME = "mamba_chunk_scan_combined"  # what errors call the operators
_HEADS = Arg("same", "B, L, H, P", "batch len head -")
_DT = Arg("float", "B, L, H", "batch len head", code="dt_dtype")
_MATRIX = Arg("same", "B, L, G, N", "batch len group -")


class Inputs(typing.NamedTuple):
    """The tensors that the operators take, in their order."""

    x: Annotated[torch.Tensor, _HEADS._replace(dtype="activation", code="dtype")]
    dt: Annotated[torch.Tensor, _DT]
    A: Annotated[torch.Tensor, Arg("float32", "H", code="A_dtype")]
    B: Annotated[torch.Tensor, _MATRIX]
    C: Annotated[torch.Tensor, _MATRIX]
    D: Annotated[torch.Tensor | None, Arg("float32", "H | H, P")]
    z: Annotated[torch.Tensor | None, _HEADS]
    dt_bias: Annotated[torch.Tensor | None, Arg("float32", "H", code="dt_bias_dtype")]
    initial_states: Annotated[torch.Tensor | None, Arg("float32", "B, H, P, N", field="initial_state")]
    seq_idx: Annotated[torch.Tensor | None, Arg("int32", "B, L")]


Ungated = typing.NamedTuple(  # type: ignore[misc]  # backward takes no z: the gate's gradient is taken before
    "Ungated", [(name, kind) for name, kind in Inputs.__annotations__.items() if name != "z"]
)


class Gradients(typing.NamedTuple):
    """Backward's results, None for those of absent inputs."""

    dx: Annotated[torch.Tensor, _HEADS]
    ddt: Annotated[torch.Tensor, _DT._replace(code="")]
    dA: Annotated[torch.Tensor, Arg("", "H")]
    dB: Annotated[torch.Tensor, _MATRIX]
    dC: Annotated[torch.Tensor, _MATRIX]
    dD: Annotated[torch.Tensor | None, Arg("", "H | H, P")]
    ddt_bias: Annotated[torch.Tensor | None, Arg("", "H")]
    dinitial_states: Annotated[torch.Tensor | None, Arg("", "B, H, P, N", field="dinitial_state")]


class Incoming(typing.NamedTuple):
    """What backward starts from."""

    dout: Annotated[torch.Tensor, _HEADS]
    dfinal_states: Annotated[torch.Tensor | None, Arg("float32", "B, H, P, N", field="dfinal_state")]


class Results(typing.NamedTuple):
    """Forward's, None where not wanted."""

    out: Annotated[torch.Tensor | None, _HEADS]
    final_states: Annotated[torch.Tensor | None, Arg("", "B, H, P, N", field="final_state")]


class Options(typing.NamedTuple):
    """What else all of the operators take, in their order."""

    dt_softplus: bool
    dt_min: float
    dt_max: float
    reverse: bool = False  # the scan goes from the last step to the first

    @property
    def A_is_log(self) -> bool:
        """No argument of these operators, but of the block's; see its Options."""
        return False


class Sizes(typing.NamedTuple):
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int

    @property
    def states(self):
        """Shape of the states before or after a step."""
        return self.batch, self.nheads, self.headdim, self.dstate


_SPEC = Spec(NAME, Inputs)


def check(inputs, options):
    """Raises on any argument that the kernels do not take; returns the sizes."""
    sizes = _SPEC.bind(inputs)
    check_head(NAME, sizes["P"], sizes["N"])
    checks.check_groups(NAME, "nheads (heads of x)", sizes["H"], sizes["G"])
    checks.no_complex(NAME, "A", inputs.A)
    _SPEC.check(inputs, sizes)
    _check_limit(NAME, options)
    return make(Sizes, [sizes[letter] for letter in "BLHPGN"])


def _check_limit(op, options):
    if not options.dt_min <= options.dt_max:
        raise ValueError(f"{op}: dt_limit must be (smallest, largest), got ({options.dt_min}, {options.dt_max})")


def check_options(name, chunk_size, dt_limit, state_dtype):
    """Raises on values of these arguments of public functions that mean nothing; returns dt_limit as floats."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"{name}: chunk_size must be a positive integer, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be a positive integer, got {chunk_size}")
    if state_dtype is not None and not (isinstance(state_dtype, torch.dtype) and state_dtype.is_floating_point):
        raise TypeError(f"{name}: state_dtype must be a floating-point torch.dtype or None, got {state_dtype}")
    return check_range(name, "dt_limit", dt_limit)


def check_head(op, headdim, dstate):
    """The kernels hold at most so much of a head."""
    if not 1 <= headdim <= abi.MAX_HEADDIM:
        raise ValueError(
            f"{op}: headdim must lie in 1..{abi.MAX_HEADDIM}, got {headdim}: "
            "split larger heads into several with the same A, dt, B and C"
        )
    if not 1 <= dstate <= abi.MAX_DSTATE:
        raise ValueError(f"{op}: dstate must lie in 1..{abi.MAX_DSTATE}, got {dstate}")


def check_parameters(op, sizes, like, like_name, inputs, options):
    """The part of check that is not about activations, also for a block's operators, which cut these out of one tensor:
    their records have other fields too, but the same names for what is read here.
    """
    letters = {"B": sizes.batch, "L": sizes.seqlen, "H": sizes.nheads, "P": sizes.headdim, "N": sizes.dstate}
    names = "A", "D", "dt_bias", "initial_states", "seq_idx"
    if options.A_is_log:  # then A and dt_bias may be float16 or bfloat16 too
        names = names[1:2] + names[3:]
        checks.check_float(op, "A_log", inputs.A, (sizes.nheads,), like, like_name, "(H,)")
        if inputs.dt_bias is not None:
            checks.check_float(op, "dt_bias", inputs.dt_bias, (sizes.nheads,), like, like_name, "(H,)")
    else:
        checks.no_complex(op, "A", inputs.A)
    _SPEC.check(inputs, letters, names, op, like, like_name)
    _check_limit(op, options)


def with_gate(ungated, z):
    """Inputs of a record without z."""
    x, dt, A, B, C, D, *others = ungated
    return make(Inputs, (x, dt, A, B, C, D, z, *others))


def ungated(inputs):
    """The inputs but z."""
    return make(Ungated, inputs[:6] + inputs[7:])


def kernel_layout(inputs, reverse=False):
    """The same tensors in the layout that the kernels take. seq_idx, 4 bytes a step, is the one tensor that goes to
    them in the order in which they take the steps.
    """
    inputs = _SPEC.layout(inputs)
    return inputs._replace(seq_idx=in_order(inputs.seq_idx, reverse)) if reverse else inputs


def in_order(seq_idx, reverse):
    """seq_idx (B, L) as kernels take it, which with reverse take the last step first."""
    return seq_idx.flip(1) if reverse and seq_idx is not None else checks.contiguous(seq_idx)


def fill(params, sizes, options, inputs, *records):
    """Sets the fields of the inputs and other records of tensors (or Views) in kernel layout; sizes and options as for
    check_parameters.
    """
    records = inputs, *records
    if options.reverse:
        records = [backwards_in_time(record, {"L": sizes.seqlen}) for record in records]
    fill_fields(params, sizes, options, *records)
    if inputs.D is not None:  # not D.stride(): a dimension of size 1 may have any
        params.D_head_stride, params.D_dim_stride = (1, 0) if inputs.D.dim() == 1 else (inputs.D.shape[1], 1)


def allocate_workspace(size_of, params, like):
    """Memory of as many bytes as the library asks for; returns the tensor, to be kept until the call."""
    size = size_of(params)
    if size == 0:
        return None
    workspace = like.new_empty((size,), dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    return workspace
