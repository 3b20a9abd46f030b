"""A Mamba layer's decoding step in plain torch: what tests compare with."""

import torch

from mamba_ssm.ops._shared.reference import working_dtype
from mamba_ssm.ops.causal_conv1d.reference import causal_conv1d_update_ref
from mamba_ssm.ops.linear import dequantize_ref
from mamba_ssm.ops.state_update.reference import selective_state_update_ref


def mamba_step_ref(
    xz: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    dt_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    D: torch.Tensor,
    x_proj_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step; both states are updated in place, as by mamba_step."""
    dtype = working_dtype(xz)
    dstate, dt_rank = A_log.shape[1], dt_proj_weight.shape[1]
    if x_proj_scales is not None:
        x_proj_weight = dequantize_ref(x_proj_weight, x_proj_scales, dtype)
    x, z = xz.to(dtype).chunk(2, dim=1)
    x = causal_conv1d_update_ref(x, conv_state, conv1d_weight, conv1d_bias, "silu")
    dt, B, C = (x @ x_proj_weight.to(dtype).T).split([dt_rank, dstate, dstate], dim=1)
    dt = dt @ dt_proj_weight.to(dtype).T
    A = -torch.exp(A_log.to(dtype))
    out = selective_state_update_ref(ssm_state, x, dt, A, B, C, D, z, dt_bias, dt_softplus=True)
    return out.to(xz.dtype)
