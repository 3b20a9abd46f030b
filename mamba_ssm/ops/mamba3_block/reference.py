"""A Mamba-3 layer between its projections in plain torch, a sequence or a step: what tests compare with."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import convert, working_dtype
from mamba_ssm.ops.activations import clamp, heavy_tail_activation
from mamba_ssm.ops.mamba3_scan import States, mamba3_scan_ref


def mamba3_block_ref(
    zxBCdt: torch.Tensor,
    dt_bias: torch.Tensor,
    B_weight: torch.Tensor,
    C_weight: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor | None,
    mimo_x: torch.Tensor | None,
    mimo_z: torch.Tensor | None,
    mimo_o: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    headdim: int,
    ngroups: int = 1,
    A_floor: float = 1e-4,
    A_softplus: bool = False,
    B_eps: float = 1e-5,
    C_eps: float = 1e-5,
    norm_eps: float = 1e-5,
    gate: bool = True,
    pairwise: bool = True,
    initial_states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_final_states: bool = False,
    chunked: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, States]:
    """mamba3_block, its arguments in their order; chunked as mamba3_scan_ref's. Differentiable any number of times."""
    dtype = working_dtype(zxBCdt)
    heads, rank, dstate = B_bias.shape
    channels, matrix = heads * headdim, rank * ngroups * dstate
    sizes = [channels, channels, matrix, matrix, heads, heads, heads]
    sizes.append(zxBCdt.shape[-1] - sum(sizes))
    z, x, B, C, dt, A, trap, angles = (part.to(dtype) for part in zxBCdt.split(sizes, dim=-1))
    given = D, mimo_x, mimo_z if gate else None, mimo_o, norm_weight
    D, mimo_x, mimo_z, mimo_o, norm_weight = (convert(tensor, dtype) for tensor in given)

    def normed(rows, weight, eps):
        rows = rows.unflatten(-1, (rank, ngroups, dstate))
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)

    dt = F.softplus(dt + dt_bias.to(dtype))
    rate = F.softplus(A) if A_softplus else heavy_tail_activation(A)
    out, states = mamba3_scan_ref(
        normed(C, C_weight, C_eps),
        normed(B, B_weight, B_eps),
        x.unflatten(-1, (heads, headdim)),
        -clamp(rate, A_floor) * dt,
        dt,
        trap,
        C_bias,
        B_bias,
        angles,
        D,
        z.unflatten(-1, (heads, headdim)) if gate else None,
        mimo_x,
        mimo_z,
        mimo_o,
        None if norm_weight is None else norm_weight.view(heads, headdim),
        norm_eps,
        initial_states,
        seq_idx,
        cu_seqlens,
        pairwise,
        return_final_states=True,
        chunked=chunked,
    )
    out = out.to(zxBCdt.dtype)
    return (out, states) if return_final_states else out


def mamba3_block_step_ref(
    zxBCdt: torch.Tensor,
    states: States,
    dt_bias: torch.Tensor,
    B_weight: torch.Tensor,
    C_weight: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor | None = None,
    mimo_x: torch.Tensor | None = None,
    mimo_z: torch.Tensor | None = None,
    mimo_o: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    ngroups: int = 1,
    A_floor: float = 1e-4,
    A_softplus: bool = False,
    B_eps: float = 1e-5,
    C_eps: float = 1e-5,
    norm_eps: float = 1e-5,
    gate: bool = True,
    pairwise: bool = True,
) -> torch.Tensor:
    """One step; the states are updated in place, as by mamba3_block_step."""
    dtype = working_dtype(zxBCdt)
    parameters = dt_bias, B_weight, C_weight, B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, norm_weight
    options = ngroups, A_floor, A_softplus, B_eps, C_eps, norm_eps, gate, pairwise
    before, headdim = States(*(state.to(dtype) for state in states)), states.ssm.shape[2]
    out, finals = mamba3_block_ref(
        zxBCdt[:, None], *parameters, headdim, *options, initial_states=before, return_final_states=True
    )
    for state, final in zip(states, finals, strict=True):
        state.copy_(final)
    return out.squeeze(1)
