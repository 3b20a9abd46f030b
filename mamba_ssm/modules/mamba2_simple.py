"""The Mamba-2 block without inference, tensor parallelism or a choice of norm, with upstream's parameter names."""

import functools
import typing

import torch
import torch.nn as nn

from mamba_ssm._arguments import check_flags, check_range, inner_width, shown
from mamba_ssm._torch import is_plain
from mamba_ssm.modules._inputs import check_input
from mamba_ssm.modules._mamba2 import Mamba2Base
from mamba_ssm.modules._state import mark
from mamba_ssm.modules.padding import Padding, masked
from mamba_ssm.ops.norm import GatedRMSNorm


class Mamba2Simple(Mamba2Base):
    """Mamba-2 block: (B, L, d_model) -> (B, L, d_model); scan, RMSNorm after the gate, projection.

    Args as for Mamba2, and:
        learnable_init_states: a parameter init_states (H, headdim, d_state), zero at first, is the state before step 0.
        activation: of the convolution, "swish" or "silu"; None for none.

    The norm goes over groups of expand * d_model / ngroups channels.
    """

    # Mamba2's options that are none here
    rmsnorm = True
    norm_before_gate = False
    D_has_hdim = False

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        learnable_init_states: bool = False,
        activation: str | None = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.d_inner = inner_width("Mamba2Simple", expand, d_model)
        self._check_sizes(d_state, d_conv, headdim, self.d_inner, ngroups, chunk_size)
        check_flags("Mamba2Simple", learnable_init_states=learnable_init_states, use_mem_eff_path=use_mem_eff_path)
        check_flags("Mamba2Simple", bias=bias, conv_bias=conv_bias)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"Mamba2Simple: activation must be None, 'silu' or 'swish', got {shown(activation)}")
        self.d_ssm = self.d_inner
        self.headdim = headdim
        self.ngroups = ngroups
        self.nheads = self.d_inner // headdim
        self.dt_limit = check_range("Mamba2Simple", "dt_limit", dt_limit)
        self.learnable_init_states = learnable_init_states
        self.activation = activation
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx

        d_in_proj = 2 * self.d_inner + 2 * ngroups * d_state + self.nheads  # z, x, B, C, dt
        self.in_proj = nn.Linear(d_model, d_in_proj, bias=bias, **factory)
        self.conv1d = self._make_conv1d(conv_bias, conv_init, factory)
        self.act = nn.SiLU()
        if learnable_init_states:
            self.init_states = nn.Parameter(torch.zeros(self.nheads, headdim, d_state, **factory))
            mark(self.init_states, "_no_weight_decay")
        self._make_heads(A_init_range, (dt_min, dt_max, dt_init_floor), factory)
        self.D = nn.Parameter(torch.ones(self.nheads, device=device, dtype=torch.float32))
        mark(self.D, "_no_weight_decay")
        self.norm = GatedRMSNorm(
            self.d_inner, eps=1e-5, norm_before_gate=False, group_size=self.d_inner // ngroups, **factory
        )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)

    def forward(
        self,
        u: torch.Tensor,
        seq_idx: torch.Tensor | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
    ) -> torch.Tensor:
        """u (B, L, d_model) -> the same shape. seq_idx: (B, L) int32; packed sequences do not see each other.

        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them, which gives zeros.
            Not with seq_idx or learnable_init_states.
        """
        check_input("Mamba2Simple", self, u, self.d_model, ("in_proj", "out_proj"), seq_idx=seq_idx)
        if attention_mask is None:
            return self._run(seq_idx, u)
        if self.learnable_init_states:
            raise ValueError(
                "Mamba2Simple: attention_mask is not supported with learnable_init_states, which are the states before "
                "the first step, padding or not: give rows of one length to a call"
            )

        run = functools.partial(self._run, None)
        return masked("Mamba2Simple", u, attention_mask, None, run, {"seq_idx": seq_idx})

    def _run(self, seq_idx: torch.Tensor | None, u: torch.Tensor, padding: Padding | None = None) -> torch.Tensor:
        """forward; u was checked."""
        seq_idx = seq_idx if padding is None else padding.seq_idx
        zxbcdt = self.in_proj(u)
        initial_states = self.init_states.expand(u.shape[0], -1, -1, -1) if self.learnable_init_states else None
        if not self._may_fuse():
            return self.out_proj(self._unfused(zxbcdt, seq_idx, initial_states, padding=padding))
        project = is_plain(self.out_proj, nn.Linear)
        y = self._fused(zxbcdt, seq_idx, project, initial_states)
        return y if project else self.out_proj(y)
