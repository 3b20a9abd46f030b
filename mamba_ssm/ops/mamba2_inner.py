"""The inside of a Mamba-2 block: convolution, scan, gate, norm and output projection of one projection's output."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.gated_norm import rmsnorm_fn
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
    state_dtype=None,
):
    """A Mamba-2 block between its input projection and its residual."""
    headdim = D.shape[1] if headdim is None else headdim
    nheads, channels = A.shape[0], conv1d_weight.shape[0]
    dim = nheads * headdim
    dstate = (channels - dim) // (2 * ngroups)
    d_mlp = (zxbcdt.shape[-1] - dim - channels - nheads) // 2
    z0, x0, z, xBC, dt = zxbcdt.split([d_mlp, d_mlp, dim, channels, nheads], dim=-1)
    xBC = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation)
    x, B, C = xBC.transpose(1, 2).split([dim, ngroups * dstate, ngroups * dstate], dim=-1)
    out, final_states = mamba_chunk_scan_combined(
        x.unflatten(-1, (nheads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, dstate)),
        C.unflatten(-1, (ngroups, dstate)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (nheads, headdim)) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
        state_dtype=state_dtype,
    )
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        out = rmsnorm_fn(out, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if d_mlp:
        out = torch.cat([F.silu(z0) * x0, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out
