"""The Mamba-2 block without inference, tensor parallelism or a choice of norm, with upstream's parameter names."""

import torch
import torch.nn as nn

from mamba_ssm._torch import is_plain
from mamba_ssm.modules._arguments import check_flags, inner_width
from mamba_ssm.modules._inputs import check_input
from mamba_ssm.modules._submodules import convolve
from mamba_ssm.modules.mamba2 import check_sizes, init_heads, make_conv1d
from mamba_ssm.ops.mamba2_block import mamba_split_conv1d_scan_combined
from mamba_ssm.ops.norm.gated import RMSNorm
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined


class Mamba2Simple(nn.Module):
    """Mamba-2 block: (B, L, d_model) -> (B, L, d_model); scan, RMSNorm after the gate, projection.

    Args as for Mamba2, and:
        learnable_init_states: a parameter init_states (H, headdim, d_state), zero at first, is the state before step 0.
        activation: of the convolution, "swish" or "silu"; None for none.

    The norm goes over groups of expand * d_model / ngroups channels.
    """

    def __init__(
        self,
        d_model,
        d_state=64,
        d_conv=4,
        conv_init=None,
        expand=2,
        headdim=128,
        ngroups=1,
        A_init_range=(1, 16),
        dt_min=0.001,
        dt_max=0.1,
        dt_init_floor=1e-4,
        dt_limit=(0.0, float("inf")),
        learnable_init_states=False,
        activation="swish",
        bias=False,
        conv_bias=True,
        chunk_size=256,
        use_mem_eff_path=True,
        layer_idx=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.d_inner = inner_width("Mamba2Simple", expand, d_model)
        check_sizes("Mamba2Simple", d_state, d_conv, headdim, self.d_inner, ngroups, chunk_size)
        check_flags("Mamba2Simple", learnable_init_states=learnable_init_states, use_mem_eff_path=use_mem_eff_path)
        check_flags("Mamba2Simple", bias=bias, conv_bias=conv_bias)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"Mamba2Simple: activation must be None, 'silu' or 'swish', got {activation!r}")
        self.headdim = headdim
        self.ngroups = ngroups
        self.nheads = self.d_inner // headdim
        self.dt_limit = tuple(dt_limit)
        self.learnable_init_states = learnable_init_states
        self.activation = activation
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx

        d_in_proj = 2 * self.d_inner + 2 * ngroups * d_state + self.nheads  # z, x, B, C, dt
        self.in_proj = nn.Linear(d_model, d_in_proj, bias=bias, **factory)
        self.conv1d = make_conv1d(self.d_inner + 2 * ngroups * d_state, d_conv, conv_bias, conv_init, factory)
        self.act = nn.SiLU()
        if learnable_init_states:
            self.init_states = nn.Parameter(torch.zeros(self.nheads, headdim, d_state, **factory))
            self.init_states._no_weight_decay = True
        init_heads(self, self.nheads, A_init_range, dt_min, dt_max, dt_init_floor, factory)
        self.D = nn.Parameter(torch.ones(self.nheads, device=device, dtype=torch.float32))
        self.D._no_weight_decay = True
        self.norm = RMSNorm(
            self.d_inner, eps=1e-5, norm_before_gate=False, group_size=self.d_inner // ngroups, **factory
        )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)

    def forward(self, u, seq_idx=None):
        """u (B, L, d_model) -> the same shape. seq_idx: (B, L) int32; packed sequences do not see each other."""
        check_input("Mamba2Simple", u, self.d_model, seq_idx=seq_idx)
        zxbcdt = self.in_proj(u)
        A = -torch.exp(self.A_log.float())
        initial_states = self.init_states.expand(u.shape[0], -1, -1, -1) if self.learnable_init_states else None
        if self.use_mem_eff_path and is_plain(self.conv1d, nn.Conv1d) and is_plain(self.norm, RMSNorm):
            project = is_plain(self.out_proj, nn.Linear)
            out = mamba_split_conv1d_scan_combined(
                zxbcdt,
                self.conv1d.weight.squeeze(1),
                self.conv1d.bias,
                self.dt_bias,
                A,
                self.D,
                self.chunk_size,
                initial_states=initial_states,
                seq_idx=seq_idx,
                dt_limit=self.dt_limit,
                activation=self.activation,
                rmsnorm_weight=self.norm.weight,
                rmsnorm_eps=self.norm.eps,
                outproj_weight=self.out_proj.weight if project else None,
                outproj_bias=self.out_proj.bias if project else None,
                headdim=self.headdim,
                ngroups=self.ngroups,
                norm_before_gate=False,
            )
            return out if project else self.out_proj(out)
        group = self.ngroups * self.d_state
        z, xBC, dt = zxbcdt.split([self.d_inner, self.d_inner + 2 * group, self.nheads], dim=-1)
        xBC = convolve(self.conv1d, xBC.transpose(1, 2), self.activation, seq_idx).transpose(1, 2)
        x, B, C = xBC.split([self.d_inner, group, group], dim=-1)
        y = mamba_chunk_scan_combined(
            x.unflatten(-1, (self.nheads, self.headdim)),
            dt,
            A,
            B.unflatten(-1, (self.ngroups, self.d_state)),
            C.unflatten(-1, (self.ngroups, self.d_state)),
            chunk_size=self.chunk_size,
            D=self.D,
            dt_bias=self.dt_bias,
            initial_states=initial_states,
            seq_idx=seq_idx,
            dt_softplus=True,
            dt_limit=self.dt_limit,
        )
        return self.out_proj(self.norm(y.flatten(2), z))
