"""A Mamba-3 layer's states of inference: angle (B, H, S), ssm (B, H, P, N), k (B, R, H, N) and v (B, H, P).

Letters: B batch, R rank, H heads, P headdim, N dstate, S angles.
"""

import typing

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm.ops.mamba3_scan import States
from mamba_ssm.ops.norm import RMSNorm


class Mamba3States(nn.Module):
    """What Mamba3 makes states by, and checks those that it is given."""

    nheads: int
    headdim: int
    d_state: int
    mimo_rank: int
    num_rope_angles: int
    in_proj: nn.Module
    dt_bias: torch.Tensor
    C_norm: RMSNorm

    def allocate_inference_cache(
        self,
        batch_size: int,
        max_seqlen: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        inplace_state: object = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zero states of a batch: angle and ssm_state in float32, k_state and v_state of dtype or in_proj's."""
        # in_proj may be quantised, and elsewhere (offloading) until it is called
        weight = getattr(self.in_proj, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            weight = self.C_norm.weight
        known = dtype or weight.dtype
        dtypes = torch.float32, torch.float32, known, known
        device = self.dt_bias.device if device is None else device
        shapes = self._state_shapes()
        angle, ssm, k, v = (
            torch.zeros(batch_size, *shape, device=device, dtype=kind)
            for shape, kind in zip(shapes, dtypes, strict=True)
        )
        return angle, ssm, k, v

    def _state_shapes(self) -> States:
        """Of one row of the batch."""
        heads, shapes = self.nheads, typing.cast(typing.Any, States)
        return shapes(
            (heads, self.num_rope_angles),
            (heads, self.headdim, self.d_state),
            (self.mimo_rank, heads, self.d_state),
            (heads, self.headdim),
        )

    def _check_states(self, *states: torch.Tensor) -> None:
        """Before one is written."""
        for name, state, shape in zip(States._fields, states, self._state_shapes(), strict=True):
            checks.check_tensor("Mamba3", f"{name}_state", state)
            if state.shape[1:] != shape:
                sizes = ", ".join(map(str, shape))
                raise ValueError(f"Mamba3: {name}_state must have shape (B, {sizes}), got {tuple(state.shape)}")
