"""The parts of upstream's Mamba3.step, for code that calls them one by one.

Letters: B batch, R rank, H heads, P headdim, N dstate, S angles.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm.modules._state import states_in_cache
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.ops.norm import GatedRMSNorm, RMSNorm

_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class UpstreamParts(nn.Module):
    """What Mamba3 has for such code. Its own forward and step do not call them."""

    layer_idx: int | None
    nheads: int
    headdim: int
    mimo_rank: int
    num_bc_heads: int
    is_outproj_norm: bool
    dt_bias: torch.Tensor
    B_norm: RMSNorm
    C_norm: RMSNorm
    norm: GatedRMSNorm

    def _rate(self, A: torch.Tensor) -> torch.Tensor:
        """-A, float32, of its projection."""
        raise NotImplementedError

    def _preprocess(
        self,
        A_proj: torch.Tensor,
        dd_dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        x: torch.Tensor,
        z: torch.Tensor,
        trap_proj: torch.Tensor,
        angle_proj: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """in_proj's parts of a step, (B, ...) each -> (DT, B, C, x, z, trap, A, angles).

        DT, trap (after the sigmoid) and A (B, H); B and C (B, R, H, N), normed; x and z (B, H, P); angles (B, H, S).
        """
        DT = F.softplus(checks.widen(dd_dt) + checks.widen(self.dt_bias))
        groups = self.mimo_rank, self.num_bc_heads, -1
        B, C = (
            norm(matrix.unflatten(-1, groups)).repeat_interleave(self.nheads // self.num_bc_heads, dim=2)
            for norm, matrix in ((self.B_norm, B), (self.C_norm, C))
        )
        x, z = (tensor.unflatten(-1, (self.nheads, self.headdim)) for tensor in (x, z))
        angles = angle_proj.unsqueeze(-2).expand(-1, self.nheads, -1)
        return DT, B, C, x, z, torch.sigmoid(trap_proj), -self._rate(A_proj), angles

    def _postprocess(
        self, y: torch.Tensor, outpj: torch.Tensor, z: torch.Tensor, zpj: torch.Tensor, headdim: int
    ) -> torch.Tensor:
        """Norm, gate and output projection of a step, with is_outproj_norm: y (B, R, H, P), z (B, H, P), outpj and zpj
        (R, H, P) -> (B, H, P) float32.
        """
        if not self.is_outproj_norm:
            raise ValueError("Mamba3: _postprocess is the norm before the gate, which is_outproj_norm=True makes")
        gates = z.float()[:, None] * zpj.float()
        normed = self.norm(y.float().flatten(-2), gates.flatten(-2)).unflatten(-1, (-1, headdim))
        return (normed * outpj.float()).sum(1)

    def _get_states_from_cache(
        self, inference_params: InferenceCache, batch_size: int, initialize_states: bool = False
    ) -> _States:
        """This layer's states in the cache, made if they are not there yet, and zeroed with initialize_states."""
        states: _States = states_in_cache(self, self.layer_idx, inference_params, batch_size)
        if initialize_states:
            for state in states:
                state.zero_()
        return states
