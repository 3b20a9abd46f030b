"""A Mamba-2 block that sees a sequence from both ends, with Mamba2's parameter names."""

import functools
import typing

import torch
import torch.nn as nn

from mamba_ssm._arguments import check_flags, check_range, inner_width, shown
from mamba_ssm.modules._inputs import check_cu_seqlens, check_input, check_projections, refuse_decoding
from mamba_ssm.modules._mamba2 import Mamba2Base
from mamba_ssm.modules._state import mark
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.padding import Padding, masked
from mamba_ssm.ops.norm import GatedRMSNorm

_COMBINATIONS = "sum", "gate"


class _Direction(Mamba2Base):
    """What a direction has for itself: convolution, scan and norm."""

    activation = "silu"

    def _make_direction(
        self,
        sizes: dict[str, typing.Any],
        starts: tuple[float | None, tuple[float, float], tuple[float, float, float]],
        conv_bias: bool,
        factory: dict[str, typing.Any],
    ) -> None:
        """sizes: attributes that Mamba2Base reads. starts: conv_init, A_init_range, (dt_min, dt_max, dt_init_floor)."""
        conv_init, A_init_range, dt_range = starts
        for name, value in sizes.items():
            setattr(self, name, value)
        self.conv1d = self._make_conv1d(conv_bias, conv_init, factory)
        self._make_heads(A_init_range, dt_range, factory)
        D = torch.ones(self.d_ssm if self.D_has_hdim else self.nheads, device=factory["device"], dtype=torch.float32)
        self.D = nn.Parameter(D)
        mark(self.D, "_no_weight_decay")
        if self.rmsnorm:
            group_size = self.d_ssm // self.ngroups
            options = {"norm_before_gate": self.norm_before_gate, "group_size": group_size, **factory}
            self.norm = GatedRMSNorm(self.d_ssm, eps=1e-5, **options)

    def _run(
        self, zxbcdt: torch.Tensor, seq_idx: torch.Tensor | None, padding: Padding | None, reverse: bool
    ) -> torch.Tensor:
        """(B, L, d_inner), before the output projection."""
        if self._may_fuse():
            return self._fused(zxbcdt, seq_idx, project=False, reverse=reverse)
        return self._unfused(zxbcdt, seq_idx, reverse=reverse, padding=padding)


class BiMamba2(_Direction):
    """Bidirectional Mamba-2 block: (B, L, d_model) -> (B, L, d_model), each step seeing the whole sequence.

    The parameters of the direction forwards in time have Mamba2's names; those of the other are under `backwards`. Each
    direction has its own convolution, dt_bias, A_log, D and norm. It is not causal: it has no states and no step.

    Args as for Mamba2, and:
        shared_proj: both directions share in_proj; False: the other has one of its own. out_proj is always shared.
        combine: "sum" adds the two up; "gate" takes g of the one and 1 - g of the other, where for each head and step
            g = sigmoid(gate_proj(u)).
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        shared_proj: bool = True,
        combine: typing.Literal["sum", "gate"] = "sum",
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        d_inner = inner_width("BiMamba2", expand, d_model)
        self._check_sizes(d_state, d_conv, headdim, d_inner, ngroups, chunk_size)
        check_flags("BiMamba2", D_has_hdim=D_has_hdim, rmsnorm=rmsnorm, norm_before_gate=norm_before_gate, bias=bias)
        check_flags("BiMamba2", conv_bias=conv_bias, use_mem_eff_path=use_mem_eff_path, shared_proj=shared_proj)
        if combine not in _COMBINATIONS:
            raise ValueError(f"BiMamba2: combine must be 'sum' or 'gate', got {shown(combine)}")
        self.d_model = d_model
        self.expand = expand
        self.combine = combine
        self.layer_idx = layer_idx
        sizes = {
            "d_state": d_state,
            "d_conv": d_conv,
            "headdim": headdim,
            "d_inner": d_inner,
            "d_ssm": d_inner,
            "ngroups": ngroups,
            "nheads": d_inner // headdim,
            "D_has_hdim": D_has_hdim,
            "rmsnorm": rmsnorm,
            "norm_before_gate": norm_before_gate,
            "dt_limit": check_range("BiMamba2", "dt_limit", dt_limit),
            "chunk_size": chunk_size,
            "use_mem_eff_path": use_mem_eff_path,
        }
        starts = conv_init, A_init_range, (dt_min, dt_max, dt_init_floor)
        d_in_proj = 2 * d_inner + 2 * ngroups * d_state + d_inner // headdim  # z, x, B, C, dt
        self.in_proj = nn.Linear(d_model, d_in_proj, bias=bias, **factory)
        self._make_direction(sizes, starts, conv_bias, factory)
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, **factory)
        self.backwards = _Direction()
        if not shared_proj:
            self.backwards.in_proj = nn.Linear(d_model, d_in_proj, bias=bias, **factory)
        self.backwards._make_direction(sizes, starts, conv_bias, factory)
        if combine == "gate":
            self.gate_proj = nn.Linear(d_model, self.nheads, **factory)
        self.shared_proj = shared_proj

    def forward(
        self,
        u: torch.Tensor,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inference_params: InferenceCache | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
    ) -> torch.Tensor:
        """u (B, L, d_model) -> the same shape.

        seq_idx: (B, L) int32; sequences packed in one row do not see each other. cu_seqlens: (sequences + 1) int32, the
        bounds of sequences packed in a batch of 1, which says the same. inference_params: None, or an error.
        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them, which gives zeros.
            Not with seq_idx or cu_seqlens.
        """
        projections = ("in_proj", "out_proj", "gate_proj") if self.combine == "gate" else ("in_proj", "out_proj")
        check_input("BiMamba2", self, u, self.d_model, projections, seq_idx=seq_idx)
        if not self.shared_proj:
            check_projections("BiMamba2", self.backwards, u, ("in_proj",))
        if inference_params is not None:
            refuse_decoding("BiMamba2")
        packed = seq_idx
        if cu_seqlens is not None:
            check_cu_seqlens("BiMamba2", cu_seqlens, u)
            positions = torch.arange(u.shape[1], device=u.device, dtype=cu_seqlens.dtype)
            packed = torch.bucketize(positions, cu_seqlens[1:], right=True, out_int32=True)[None]
        if attention_mask is None:
            return self._both(packed, u)
        run = functools.partial(self._both, None)
        return masked("BiMamba2", u, attention_mask, None, run, {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens})

    def _both(self, seq_idx: torch.Tensor | None, u: torch.Tensor, padding: Padding | None = None) -> torch.Tensor:
        """forward, whose arguments were checked."""
        seq_idx = seq_idx if padding is None else padding.seq_idx
        zxbcdt = self.in_proj(u)
        y = self._run(zxbcdt, seq_idx, padding, reverse=False)
        if not self.shared_proj:
            zxbcdt = typing.cast(nn.Module, self.backwards.in_proj)(u)
        y_b = self.backwards._run(zxbcdt, seq_idx, padding, reverse=True)
        if self.combine == "sum":
            return self.out_proj(y + y_b)
        gate = torch.sigmoid(self.gate_proj(u))[..., None].to(y.dtype)
        heads = self.nheads, self.headdim
        return self.out_proj(torch.lerp(y_b.unflatten(-1, heads), y.unflatten(-1, heads), gate).flatten(-2))

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, **kwargs: object) -> typing.NoReturn:
        """There is none: an error that says so."""
        refuse_decoding("BiMamba2")
