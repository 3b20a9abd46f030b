"""A Mamba-2 layer's decoding step in plain torch: what tests compare with."""

import torch
import torch.nn.functional as F

from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.activations import clamp
from mamba_ssm.ops.causal_conv1d.reference import causal_conv1d_update_ref
from mamba_ssm.ops.state_update.reference import selective_state_update_ref


def mamba2_step_ref(
    zxbcdt: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    rmsnorm_weight: torch.Tensor | None = None,
    ngroups: int = 1,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    gate: bool = True,
    rmsnorm_eps: float = 1e-5,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    """One step; both states are updated in place, as by mamba2_step."""
    dtype = working_dtype(zxbcdt)
    batch = zxbcdt.shape[0]
    _, nheads, headdim, dstate = ssm_state.shape
    dim, matrix = nheads * headdim, ngroups * dstate
    z, xBC, dt = zxbcdt.split([dim, dim + 2 * matrix, nheads], dim=1)
    xBC = causal_conv1d_update_ref(xBC.to(dtype), conv_state, conv1d_weight, conv1d_bias, "silu")
    x, B, C = xBC.split([dim, matrix, matrix], dim=1)
    dt = clamp(F.softplus(dt.to(dtype) + dt_bias.to(dtype)), *dt_limit)
    y = selective_state_update_ref(
        ssm_state,
        x.view(batch, nheads, headdim),
        dt[:, :, None].expand(-1, -1, headdim),
        -torch.exp(A_log.to(dtype))[:, None, None].expand(-1, headdim, dstate),
        B.view(batch, ngroups, dstate),
        C.view(batch, ngroups, dstate),
        D.view(nheads, -1).expand(nheads, headdim),
    ).view(batch, ngroups, -1)
    z = F.silu(z.to(dtype)).view(y.shape)
    if rmsnorm_weight is None:
        return (y * z if gate else y).flatten(1).to(zxbcdt.dtype)
    y = y.to(zxbcdt.dtype).to(dtype)  # as it lies in memory before the norm
    y = y if norm_before_gate else y * z
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + rmsnorm_eps)
    y = y * rmsnorm_weight.to(dtype).view(ngroups, -1)
    return (y * z if norm_before_gate else y).flatten(1).to(zxbcdt.dtype)
