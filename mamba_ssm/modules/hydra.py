"""Hydra: sequence mixing by quasiseparable matrices (Hwang et al. 2024, arXiv 2407.09941) on Mamba-2's scan."""

import typing

import torch
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._arguments import check_flags, check_integer, check_range, inner_width
from mamba_ssm.modules._inputs import check_input, refuse_decoding
from mamba_ssm.modules._mamba2 import Mamba2Base
from mamba_ssm.modules._state import mark
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.padding import Padding, masked
from mamba_ssm.ops.norm import GatedRMSNorm
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined


class Hydra(Mamba2Base):
    """Hydra block: (B, L, d_model) -> (B, L, d_model), each step seeing the whole sequence.

    y = shift(scan(x)) + shift_back(scan backwards(x)) + (D + fc_D(x)) x: a step gets from the first scan what came
    before it, from the second what follows, and itself from the diagonal alone. One in_proj makes z, x, and B, C and dt
    of both directions; A and dt_bias are shared. It is not causal: it has no states and no step.

    Args as for Mamba2, but d_conv: width of the convolution, which is centred; odd. The norm is before the gate.
    """

    # Mamba2's options that are none here
    rmsnorm = True
    norm_before_gate = True
    D_has_hdim = False
    activation = "silu"

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 7,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.expand = expand
        self.d_inner = self.d_ssm = inner_width("Hydra", expand, d_model)
        check_integer("Hydra", "d_conv", d_conv)
        if d_conv % 2 == 0:
            raise ValueError(f"Hydra: d_conv must be odd, for a convolution that is centred, got {d_conv}")
        self._check_sizes(d_state, 4, headdim, self.d_inner, ngroups, chunk_size)
        check_flags("Hydra", bias=bias, conv_bias=conv_bias)
        self.d_conv = d_conv
        self.headdim = headdim
        self.ngroups = ngroups
        self.nheads = self.d_inner // headdim
        self.dt_limit = check_range("Hydra", "dt_limit", dt_limit)
        self.chunk_size = chunk_size
        self.layer_idx = layer_idx

        channels = self.d_inner + 4 * ngroups * d_state  # x, B and C forwards, B and C backwards
        self.in_proj = nn.Linear(d_model, self.d_inner + channels + 2 * self.nheads, bias=bias, **factory)
        self.conv1d = self._make_conv1d(conv_bias, conv_init, factory, channels, d_conv // 2)
        self.act = nn.SiLU()
        self._make_heads(A_init_range, (dt_min, dt_max, dt_init_floor), factory)
        self.D = nn.Parameter(torch.ones(self.nheads, device=device, dtype=torch.float32))
        mark(self.D, "_no_weight_decay")
        self.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False, **factory)
        self.norm = GatedRMSNorm(
            self.d_inner, eps=1e-5, norm_before_gate=True, group_size=self.d_inner // ngroups, **factory
        )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)

    def forward(
        self,
        u: torch.Tensor,
        inference_params: InferenceCache | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
    ) -> torch.Tensor:
        """u (B, L, d_model) -> the same shape. inference_params: None, or an error.

        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them, which gives zeros.
        """
        check_input("Hydra", self, u, self.d_model, ("in_proj", "conv1d", "fc_D", "out_proj"))
        if inference_params is not None:
            refuse_decoding("Hydra")
        if attention_mask is None:
            return self._run(u)
        return masked("Hydra", u, attention_mask, None, self._run, {})

    def _run(self, u: torch.Tensor, padding: Padding | None = None) -> torch.Tensor:
        """forward; u was checked."""
        matrices = 2 * self.ngroups * self.d_state
        z, xBC, dt = self.in_proj(u).split([self.d_inner, self.d_inner + 2 * matrices, 2 * self.nheads], dim=-1)
        if padding is not None:  # the convolution sees both sides of a step
            xBC = padding.zero(xBC)
        xBC = self.act(self.conv1d(xBC.transpose(1, 2))).transpose(1, 2)
        if padding is not None:
            xBC = padding.zero(xBC)
        x, BC, BC_b = xBC.split([self.d_inner, matrices, matrices], dim=-1)
        dt, dt_b = dt.chunk(2, dim=-1)
        diagonal = self.D + self.fc_D(x)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        seq_idx = None if padding is None else padding.seq_idx
        before = self._scan(x, dt, BC, seq_idx, reverse=False)[:, :-1]
        behind = self._scan(x, dt_b, BC_b, seq_idx, reverse=True)[:, 1:]
        y = x * diagonal[..., None].to(x.dtype) + F.pad(before, (0, 0, 0, 0, 1, 0)) + F.pad(behind, (0, 0, 0, 0, 0, 1))
        return self.out_proj(self.norm(y.flatten(2), z))

    def _scan(
        self, x: torch.Tensor, dt: torch.Tensor, BC: torch.Tensor, seq_idx: torch.Tensor | None, reverse: bool
    ) -> torch.Tensor:
        B, C = BC.unflatten(-1, (2 * self.ngroups, self.d_state)).chunk(2, dim=2)
        out: typing.Any = mamba_chunk_scan_combined(
            x,
            dt,
            self._A(),
            B,
            C,
            self.chunk_size,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            seq_idx=seq_idx,
            reverse=reverse,
        )
        return out

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, **kwargs: object) -> typing.NoReturn:
        """There is none: an error that says so."""
        refuse_decoding("Hydra")
