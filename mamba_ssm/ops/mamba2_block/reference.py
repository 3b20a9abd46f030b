"""Plain torch references of the inside of a Mamba-2 block: readable, differentiable any number of times."""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import reference
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_ref
from mamba_ssm.ops.mamba2_block.arguments import NAME
from mamba_ssm.ops.norm import gated_rms_norm_ref
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined
from mamba_ssm.ops.ssd.reference import ssd_chunk_scan_combined_ref


def mamba_conv1d_scan_ref(
    xBC: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt: torch.Tensor,
    A: torch.Tensor,
    chunk_size: int | None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    activation: str | None = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    return_final_states: bool = False,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal convolution of xBC (B, L, H P + 2 G N), then Mamba-2's scan over its x, B and C.

    dt (B, L, H); A (H); D (H), or (H, P), which then need no headdim; z (B, L, H P); the rest as in
    mamba_split_conv1d_scan_combined. Returns out (B, L, H P); with return_final_states (out, final_states).
    """
    nheads = A.shape[0]
    headdim = typing.cast(torch.Tensor, D).shape[1] if headdim is None else headdim
    dim = nheads * headdim
    dstate = (xBC.shape[2] - dim) // (2 * ngroups)
    # Operators while exporting, as for a caller of the two public functions.
    convolve = causal_conv1d_fn if reference.exporting else causal_conv1d_ref
    scan = mamba_chunk_scan_combined if reference.exporting else ssd_chunk_scan_combined_ref
    conv_out = convolve(
        xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation, reverse=reverse
    )
    xBC = typing.cast(torch.Tensor, conv_out).transpose(1, 2)
    x, B, C = xBC.split([dim, ngroups * dstate, ngroups * dstate], dim=-1)
    heads, groups = (nheads, headdim), (ngroups, dstate)
    out, final_states = typing.cast(typing.Any, scan)(
        x.unflatten(-1, heads),
        dt,
        A,
        B.unflatten(-1, groups),
        C.unflatten(-1, groups),
        chunk_size,
        D=D,
        z=None if z is None else z.unflatten(-1, heads),
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_limit=dt_limit,
        return_final_states=True,
        reverse=reverse,
    )
    return (out.flatten(2), final_states) if return_final_states else out.flatten(2)


def mamba_split_conv1d_scan_ref(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    return_final_states: bool = False,
    *,
    reverse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """mamba_split_conv1d_scan_combined in plain torch; the order of arguments is upstream's reference's."""
    checks.check_devices(NAME, "zxbcdt", zxbcdt, outproj_weight=outproj_weight, outproj_bias=outproj_bias)
    headdim = D.shape[1] if headdim is None else headdim
    nheads, channels = A.shape[0], conv1d_weight.shape[0]
    dim = nheads * headdim
    d_mlp = (zxbcdt.shape[-1] - dim - channels - nheads) // 2
    z0, x0, z, xBC, dt = zxbcdt.split([d_mlp, d_mlp, dim, channels, nheads], dim=-1)
    out, final_states = mamba_conv1d_scan_ref(
        xBC,
        conv1d_weight,
        conv1d_bias,
        dt,
        A,
        chunk_size,
        D,
        z if rmsnorm_weight is None else None,
        dt_bias,
        True,
        dt_limit,
        activation,
        headdim,
        ngroups,
        initial_states,
        seq_idx,
        True,
        reverse=reverse,
    )
    if rmsnorm_weight is not None:
        out = gated_rms_norm_ref(out, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if d_mlp:
        out = torch.cat([F.silu(z0) * x0, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight.to(out.dtype), None if outproj_bias is None else outproj_bias.to(out.dtype))
    return (out, final_states) if return_final_states else out
