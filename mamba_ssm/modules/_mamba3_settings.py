"""Which settings a Mamba-3 block takes."""

from mamba_ssm._arguments import check_integer, check_number
from mamba_ssm._native import abi


def check_sizes(d_state: int, headdim: int, ngroups: int, mimo_rank: int) -> None:
    """Those that the kernels take."""
    check_integer("Mamba3", "d_state", d_state, most=abi.MAX_DSTATE)
    check_integer("Mamba3", "headdim", headdim, most=abi.MAX_HEADDIM)
    check_integer("Mamba3", "ngroups", ngroups)
    check_integer("Mamba3", "mimo_rank", mimo_rank, most=abi.MAX_RANK)


def check_rates(A_floor: float, rope_fraction: float) -> None:
    """A_floor is 0 or more, rope_fraction from 0 to 1."""
    check_number("Mamba3", "A_floor", A_floor, least=0)
    check_number("Mamba3", "rope_fraction", rope_fraction, least=0)
    if rope_fraction > 1:
        raise ValueError(f"Mamba3: rope_fraction must be at most 1, got {rope_fraction!r}")


def check_heads(d_inner: int, headdim: int, ngroups: int, world: int) -> int:
    """The number of heads, of all ranks of process_group; world is how many these are."""
    if d_inner % headdim:
        raise ValueError(f"Mamba3: expand * d_model must be a multiple of headdim ({headdim}), got {d_inner}")
    nheads = d_inner // headdim
    if nheads % ngroups:
        raise ValueError(f"Mamba3: ngroups must divide the {nheads} heads, got {ngroups}")
    if nheads % world:
        raise ValueError(f"Mamba3: the heads must be a multiple of the {world} ranks of process_group, got {nheads}")
    if ngroups > 1 and ngroups % world:
        raise ValueError(
            f"Mamba3: ngroups must be 1 or a multiple of the {world} ranks of process_group, got {ngroups}"
        )
    return nheads
