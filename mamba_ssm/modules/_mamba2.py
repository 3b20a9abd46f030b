"""What Mamba-2's blocks share: how parameters start, and the ways from in_proj's output to out_proj's input."""

import typing

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._arguments import check_integer, check_number, check_range, is_number, shown
from mamba_ssm._native import abi
from mamba_ssm._torch import is_plain, reference
from mamba_ssm.distributed.across_ranks import mamba2_across_ranks
from mamba_ssm.modules._state import initial_dt_bias, is_shape_only, mark
from mamba_ssm.modules._submodules import conv_widths, convolve, plain_convolution
from mamba_ssm.modules.padding import Padding
from mamba_ssm.ops.causal_conv1d import wants_silu
from mamba_ssm.ops.mamba2_block import Options, mamba_split_conv1d_scan_combined
from mamba_ssm.ops.mamba2_block.arguments import Inputs
from mamba_ssm.ops.norm import GatedRMSNorm
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined


class Mamba2Base(nn.Module):
    """Subclasses have the attributes of Mamba2 that are read here, under its names.

    zxbcdt, in_proj's output (B, L, ...), holds MLP gate and MLP (where d_ssm < d_inner), z, x, B, C and dt.
    Letters: B batch, L length, H heads, P headdim, G groups of B and C, N d_state.
    """

    int8_weights = "in_proj", "out_proj"
    supports_context_parallel = False
    d_state: int
    d_conv: int
    headdim: int
    d_inner: int
    d_ssm: int
    ngroups: int
    nheads: int
    D_has_hdim: bool
    rmsnorm: bool
    norm_before_gate: bool
    dt_limit: tuple[float, float]
    activation: str | None
    chunk_size: int
    use_mem_eff_path: bool
    conv1d: nn.Conv1d
    norm: GatedRMSNorm
    D: nn.Parameter
    out_proj: nn.Linear

    # ---- parameters --------------------------------------------------------------------------------------------------

    def _check_sizes(self, d_state: int, d_conv: int, headdim: int, d_ssm: int, ngroups: int, chunk_size: int) -> None:
        """Raises on sizes that the kernels do not take."""
        name = type(self).__name__
        check_integer(name, "d_state", d_state, most=abi.MAX_DSTATE)
        check_integer(name, "d_conv", d_conv, *conv_widths())
        check_integer(name, "headdim", headdim, most=abi.MAX_HEADDIM)
        check_integer(name, "d_ssm", d_ssm)
        check_integer(name, "ngroups", ngroups)
        check_integer(name, "chunk_size", chunk_size)
        if d_ssm % headdim:
            raise ValueError(
                f"{name}: the channels of the scan (d_ssm, or expand * d_model) must be a multiple of headdim "
                f"({headdim}), got {d_ssm}"
            )
        if (d_ssm // headdim) % ngroups:
            raise ValueError(f"{name}: ngroups must divide the {d_ssm // headdim} heads, got {ngroups}")

    def _make_conv1d(
        self,
        bias: bool,
        conv_init: float | None,
        factory: dict[str, typing.Any],
        channels: int | None = None,
        padding: int | None = None,
    ) -> nn.Conv1d:
        """The depthwise convolution, which holds the parameters; the kernels compute it, unless it is centred."""
        channels = self.d_ssm + 2 * self.ngroups * self.d_state if channels is None else channels
        padding = self.d_conv - 1 if padding is None else padding
        conv1d = nn.Conv1d(channels, channels, self.d_conv, groups=channels, padding=padding, bias=bias, **factory)
        if conv_init is not None:
            check_number(type(self).__name__, "conv_init", conv_init, least=0)
            nn.init.uniform_(conv1d.weight, -conv_init, conv_init)
        return conv1d

    def _make_heads(
        self, A_init_range: tuple[float, float], dt_range: tuple[float, float, float], factory: dict[str, typing.Any]
    ) -> None:
        """Parameters dt_bias and A_log: softplus(dt_bias) starts log-uniform in [dt_min, dt_max], -A uniform.

        dt_range: dt_min, dt_max, dt_init_floor.
        """
        name = type(self).__name__
        low, high = check_range(name, "A_init_range", A_init_range)
        if not (low > 0 and is_number(high)):
            raise ValueError(
                f"{name}: A_init_range must be two positive, finite numbers in order, got {shown(A_init_range)}"
            )
        dt_bias = initial_dt_bias(self.nheads, *dt_range, factory["device"])
        self.dt_bias = nn.Parameter(dt_bias.to(factory["dtype"] or torch.get_default_dtype()))
        mark(self.dt_bias, "_no_weight_decay")
        mark(self.dt_bias, "_no_reinit")
        A = torch.empty(self.nheads, device=factory["device"], dtype=torch.float32).uniform_(low, high)
        A = A if is_shape_only(A) else torch.log(A)
        self.A_log = nn.Parameter(A.to(dtype=factory["dtype"]))  # None: float32, as upstream's
        mark(self.A_log, "_no_weight_decay")

    def _A(self) -> torch.Tensor:
        return -torch.exp(self.A_log.float())

    def _D(self) -> torch.Tensor:
        """(H), or (H, P)."""
        return self.D.view(self.nheads, self.headdim) if self.D_has_hdim else self.D

    # ---- through one operator ----------------------------------------------------------------------------------------

    def _may_fuse(self) -> bool:
        """Whether all that the operator computes before out_proj is in the parameters it takes."""
        plain_norm = not self.rmsnorm or self._has_plain_norm()
        return self.use_mem_eff_path and not reference.on and is_plain(self.conv1d, nn.Conv1d) and plain_norm

    def _has_plain_norm(self) -> bool:
        """Whether norm does what the operators do with its weight: a norm put in its place may have other groups."""
        norm = self.norm
        return (
            is_plain(norm, GatedRMSNorm)
            and norm.norm_before_gate == self.norm_before_gate
            and (norm.group_size or self.d_ssm) == self.d_ssm // self.ngroups
        )

    def _norm_weight_and_eps(self) -> tuple[torch.Tensor | None, float]:
        if not self.rmsnorm:
            return None, 1e-6
        norm = self.norm
        return norm.weight, norm.eps

    def _fused(
        self,
        zxbcdt: torch.Tensor,
        seq_idx: torch.Tensor | None,
        project: bool,
        initial_states: torch.Tensor | None = None,
        reverse: bool = False,
    ) -> torch.Tensor:
        """(B, L, d_inner), or with project behind out_proj's weight and bias, (B, L, d_model)."""
        norm_weight, norm_eps = self._norm_weight_and_eps()
        out: typing.Any = mamba_split_conv1d_scan_combined(
            zxbcdt,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            self._A(),
            self._D(),
            self.chunk_size,
            initial_states=initial_states,
            seq_idx=seq_idx,
            dt_limit=self.dt_limit,
            activation=self.activation,
            rmsnorm_weight=norm_weight,
            rmsnorm_eps=norm_eps,
            outproj_weight=self.out_proj.weight if project else None,
            outproj_bias=self.out_proj.bias if project else None,
            headdim=self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=self.norm_before_gate,
            reverse=reverse,
        )
        return out

    # ---- step by step ------------------------------------------------------------------------------------------------

    def _unfused(
        self,
        zxbcdt: torch.Tensor,
        seq_idx: torch.Tensor | None,
        initial_states: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        states: tuple[torch.Tensor, torch.Tensor] | None = None,
        continues: bool = False,
        reverse: bool = False,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """(B, L, d_inner), by a call of each submodule that is more than its parameters.

        states: conv_state and ssm_state of inference, which are written; with continues they are also gone on from.
            With cu_seqlens they have a row for each sequence.
        padding: with its seq_idx.
        """
        conv_state, ssm_state = (None, None) if states is None else states
        if continues and ssm_state is not None:
            initial_states = ssm_state.clone()
        z0, x0, z, xBC, dt = self._split(zxbcdt)
        xBC = xBC.transpose(1, 2)
        packed = seq_idx, conv_state, continues, cu_seqlens
        xBC = convolve(self.conv1d, xBC, self.activation, *packed, reverse=reverse, padding=padding).transpose(1, 2)
        x, B, C = self._split_xBC(xBC)
        y: typing.Any = mamba_chunk_scan_combined(
            x,
            dt,
            self._A(),
            B,
            C,
            chunk_size=self.chunk_size,
            D=self._D(),
            z=None if self.rmsnorm else z.unflatten(-1, (self.nheads, self.headdim)),
            dt_bias=self.dt_bias,
            initial_states=initial_states,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_final_states=states is not None and cu_seqlens is None,
            return_varlen_states=states is not None and cu_seqlens is not None,
            reverse=reverse,
        )
        if ssm_state is not None:
            y, state = y
            with torch.no_grad():
                ssm_state.copy_(state)
        return self._norm_and_mlp(y.flatten(2), z, z0, x0)

    def _across_ranks(self, zxbcdt: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
        """(B, L, d_inner), of this rank's part of the sequence; see mamba_ssm.distributed.context_parallel."""
        conv1d = plain_convolution(self.conv1d)
        plain = not self.rmsnorm or self._has_plain_norm()
        norm_weight, norm_eps = self._norm_weight_and_eps() if plain else (None, 0.0)
        dt_min, dt_max = map(float, self.dt_limit)
        inputs = Inputs(
            zxbcdt,
            conv1d.weight.squeeze(1),
            conv1d.bias,
            self.dt_bias,
            self.A_log,
            self._D(),
            None,
            None,
            norm_weight,
        )
        silu = wants_silu(type(self).__name__, self.activation)
        of_norm = norm_eps, self.norm_before_gate
        options = Options(self.headdim, self.ngroups, dt_min, dt_max, silu, *of_norm, A_is_log=True)
        y = mamba2_across_ranks(inputs, options, plain, group)
        if plain:
            return y
        z0, x0, z, _, _ = self._split(zxbcdt)
        return self._norm_and_mlp(y, z, z0, x0)

    def _split(
        self, zxbcdt: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
        """MLP gate and MLP (None where d_ssm is d_inner), z, xBC, dt."""
        d_mlp = self.d_inner - self.d_ssm
        sizes = [self.d_ssm, self.d_ssm + 2 * self.ngroups * self.d_state, self.nheads]
        if d_mlp == 0:
            z, xBC, dt = zxbcdt.split(sizes, dim=-1)
            return None, None, z, xBC, dt
        z0, x0, z, xBC, dt = zxbcdt.split([d_mlp, d_mlp, *sizes], dim=-1)
        return z0, x0, z, xBC, dt

    def _split_xBC(self, xBC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (..., H, P), B and C (..., G, N) of the convolution's output."""
        size = self.ngroups * self.d_state
        x, B, C = xBC.split([self.d_ssm, size, size], dim=-1)
        groups = (self.ngroups, self.d_state)
        return x.unflatten(-1, (self.nheads, self.headdim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def _norm_and_mlp(
        self, y: torch.Tensor, z: torch.Tensor, z0: torch.Tensor | None, x0: torch.Tensor | None
    ) -> torch.Tensor:
        """The norm with its gate, and the gated MLP beside it. Without the norm the scan has gated y."""
        if self.rmsnorm:
            y = self.norm(y, z)
        return y if z0 is None or x0 is None else torch.cat([F.silu(z0) * x0, y], dim=-1)
