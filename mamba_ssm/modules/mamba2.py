"""The Mamba-2 block (Mamba-2, arXiv 2405.21060, section 7), with upstream's parameter names, shapes and states."""

import functools
import typing

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._arguments import check_flags, check_process_group, check_range, inner_width
from mamba_ssm._torch import is_bare, is_plain, wants_one_node, weight_and_bias
from mamba_ssm.distributed.distributed_utils import all_reduce, reduce_scatter
from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from mamba_ssm.modules._inputs import check_cu_seqlens, check_input, is_continued, refuse_with_context_parallel
from mamba_ssm.modules._mamba2 import Mamba2Base
from mamba_ssm.modules._state import StatefulBlock, mark
from mamba_ssm.modules._submodules import convolve_differentiable_step, convolve_step
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.padding import Padding, masked
from mamba_ssm.ops.activations import clamp
from mamba_ssm.ops.block_node import Layer, Norm
from mamba_ssm.ops.causal_conv1d import wants_silu
from mamba_ssm.ops.linear import project
from mamba_ssm.ops.mamba2_block import BlockInputs, Options, mamba2_block, mamba2_node
from mamba_ssm.ops.mamba2_step import mamba2_step
from mamba_ssm.ops.norm import GatedRMSNorm
from mamba_ssm.ops.state_update import selective_state_step, selective_state_update

# The ways from u to the block's output, of which Mamba2._route picks one.
_Route = typing.Literal[
    "step",  # one token, from states of inference
    "across ranks",  # this rank's part of a sequence that context_parallel cuts
    "one node",  # all of the block as one autograd node
    "through out_proj",  # in_proj, then one operator for all the rest
    "up to out_proj",  # the same, and out_proj is called
    "by parts",  # an operator each: submodules that are more than their parameters, and states of inference
]


class Mamba2(Mamba2Base, StatefulBlock):
    """Mamba-2 block: (B, L, d_model) -> (B, L, d_model).

    Args:
        d_model: width of input and output. d_state: states per channel (N), 1..256. d_conv: width of the convolution,
            2..4. conv_init: its weights start uniform in [-conv_init, conv_init]; None for nn.Conv1d's own start.
        expand: d_inner = expand * d_model channels inside, of which d_ssm (None: all) go through the scan, in heads of
            headdim (1..256) channels; the rest are a gated MLP.
        ngroups: groups of B and C, a divisor of the number of heads.
        A_init_range: -A starts uniform in it. D_has_hdim: D per channel, not per head.
        rmsnorm, norm_before_gate: RMSNorm (over groups of d_ssm / ngroups) before or after the gate; or only the gate.
        dt_min, dt_max, dt_init_floor: range of dt at initialisation. dt_limit: dt is clamped to it.
        bias, conv_bias: of in_proj and out_proj; of the convolution.
        chunk_size: for code written for upstream; has no effect on the result.
        use_mem_eff_path: train through one operator, which saves memory; not while conv1d or norm is replaced or has
            hooks. An in_proj or out_proj with such (LoRA, quantisation) is called before or after it.
        layer_idx: key of the inference cache.
        process_group: tensor parallel. This rank holds its part of the channels, heads and groups.
        sequence_parallel: with process_group, input and output are this rank's part of the first dimension; False:
            they are whole on every rank.
    """

    supports_context_parallel = True
    context_parallel_group: "dist.ProcessGroup | None" = None  # which mamba_ssm.distributed.context_parallel sets

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
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
        process_group: "dist.ProcessGroup | None" = None,
        sequence_parallel: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        flags = {"D_has_hdim": D_has_hdim, "rmsnorm": rmsnorm, "norm_before_gate": norm_before_gate}
        flags |= {"sequence_parallel": sequence_parallel, "bias": bias, "conv_bias": conv_bias}
        check_flags("Mamba2", **flags, use_mem_eff_path=use_mem_eff_path)
        check_process_group("Mamba2", process_group)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.local_rank = 0 if process_group is None else dist.get_rank(process_group)
        d_inner = inner_width("Mamba2", expand, d_model)
        self._check_sizes(d_state, d_conv, headdim, d_inner if d_ssm is None else d_ssm, ngroups, chunk_size)
        self._check_parts(d_inner, d_ssm, ngroups)

        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        # this rank's part
        self.d_inner = d_inner // self.world_size
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm // self.world_size
        self.ngroups = ngroups // self.world_size
        self.headdim = headdim
        self.nheads = self.d_ssm // headdim
        self.D_has_hdim = D_has_hdim
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_limit = check_range("Mamba2", "dt_limit", dt_limit)
        self.activation = "silu"
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.layer_idx = layer_idx

        self.in_proj = self._make_in_proj(bias, factory)
        self.conv1d = self._make_conv1d(conv_bias, conv_init, factory)
        self.act = nn.SiLU()
        self._make_heads(A_init_range, (dt_min, dt_max, dt_init_floor), factory)
        D = torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device, dtype=torch.float32)
        self.D = nn.Parameter(D)
        mark(self.D, "_no_weight_decay")
        if rmsnorm:
            group_size = self.d_ssm // self.ngroups
            self.norm = GatedRMSNorm(
                self.d_ssm, eps=1e-5, norm_before_gate=norm_before_gate, group_size=group_size, **factory
            )
        self.out_proj = self._make_out_proj(bias, factory)

    def _check_parts(self, d_inner: int, d_ssm: int | None, ngroups: int) -> None:
        """Raises on sizes of all ranks that do not fit, or that the ranks cannot share."""
        if d_ssm is not None and d_ssm > d_inner:
            raise ValueError(f"Mamba2: d_ssm must be at most expand * d_model = {d_inner}, got {d_ssm}")
        for name, size in (("expand * d_model", d_inner), ("d_ssm", d_ssm or d_inner), ("ngroups", ngroups)):
            if size % self.world_size:
                raise ValueError(
                    f"Mamba2: {name} must be a multiple of the {self.world_size} ranks of process_group, got {size}"
                )

    def _make_in_proj(self, bias: bool, factory: dict[str, typing.Any]) -> nn.Linear:
        # in this order: MLP gate and MLP (where d_ssm < d_inner), z, x, B, C, dt
        d_in_proj = 2 * self.d_inner + 2 * self.ngroups * self.d_state + self.nheads
        if self.process_group is None:
            return nn.Linear(self.d_model, d_in_proj, bias=bias, **factory)
        over = self.process_group, bias, self.sequence_parallel
        return ColumnParallelLinear(self.d_model, d_in_proj * self.world_size, *over, **factory)

    def _make_out_proj(self, bias: bool, factory: dict[str, typing.Any]) -> nn.Linear:
        if self.process_group is None:
            return nn.Linear(self.d_inner, self.d_model, bias=bias, **factory)
        over = self.process_group, bias, self.sequence_parallel
        return RowParallelLinear(self.d_inner * self.world_size, self.d_model, *over, **factory)

    def forward(
        self,
        u: torch.Tensor,
        seqlen: int | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inference_params: InferenceCache | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
    ) -> torch.Tensor:
        """u (B, L, d_model), or (B * L, d_model) with seqlen = L -> the same shape.

        With process_group and sequence_parallel, u and the result are this rank's part of the first dimension.

        seq_idx: (B, L) int32; sequences packed in one row do not see each other.
        cu_seqlens: (sequences + 1) int32, the bounds of sequences that are packed in a batch of 1; it says all that
            seq_idx does, which may be given beside it, as upstream asks, and is then not read.
        inference_params: an object with key_value_memory_dict and seqlen_offset. With offset 0 the call fills this
            layer's states there, one row for each of the batch or of the packed sequences; with a positive one it
            continues from these states, by a step (L = 1) or a piece.
        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them. Padding does not
            change states and gives zeros. Not with seq_idx, cu_seqlens or process_group; with inference_params for the
            first call alone.
        """
        continues = self._check_call(u, seqlen, seq_idx, cu_seqlens, inference_params)
        if attention_mask is None:
            return self._run(seqlen, seq_idx, cu_seqlens, inference_params, continues, u)
        excluded: dict[str, object] = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        excluded |= {"process_group": self.process_group, "context_parallel": self.context_parallel_group}
        run = functools.partial(self._run, None, None, None, inference_params, continues)
        rows = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        out = masked("Mamba2", rows, attention_mask, inference_params, run, excluded)
        return out if seqlen is None else out.flatten(0, 1)

    def _run(
        self,
        seqlen: int | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        inference_params: InferenceCache | None,
        continues: bool,
        u: torch.Tensor,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """forward, whose arguments were checked; padding without seqlen, seq_idx and cu_seqlens."""
        seq_idx = seq_idx if padding is None else padding.seq_idx
        steps = u.shape[1] if seqlen is None else seqlen
        route = self._route(infers=inference_params is not None, steps_once=continues and steps == 1)
        if route == "across ranks":
            group: typing.Any = self.context_parallel_group
            others: dict[str, typing.Any] = {"process_group": self.process_group, "seqlen": seqlen}
            packed = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
            refuse_with_context_parallel("Mamba2", **others, **packed, inference_params=inference_params)
            return self.out_proj(self._across_ranks(self.in_proj(u), group))
        if route == "step" or route == "one node":
            u = u if seqlen is None else u.unflatten(0, (-1, seqlen))
            if route == "step":
                out = self._step_from_cache(u, typing.cast(InferenceCache, inference_params))
            else:
                out = self._as_one_node(u, seq_idx, cu_seqlens)
            return out if seqlen is None else out.flatten(0, 1)

        zxbcdt = self.in_proj(u)
        if seqlen is not None:
            zxbcdt = zxbcdt.unflatten(0, (-1, seqlen))
        if cu_seqlens is not None:
            cu_seqlens, seq_idx = self._packed(cu_seqlens, zxbcdt)
        projected = route == "through out_proj"
        if route == "by parts":
            states = None
            if inference_params is not None:
                rows = zxbcdt.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                states = self._get_states_from_cache(inference_params, rows)
            cached: dict[str, typing.Any] = {"states": states, "continues": continues}
            y = self._unfused(zxbcdt, seq_idx, cu_seqlens=cu_seqlens, **cached, padding=padding)
        else:
            y = self._fused(zxbcdt, seq_idx, projected)
        if seqlen is not None:
            y = y.flatten(0, 1)
        if not projected:
            return self.out_proj(y)
        if self.process_group is None:
            return y
        return (reduce_scatter if self.sequence_parallel else all_reduce)(y, self.process_group)

    def _check_call(
        self,
        u: torch.Tensor,
        seqlen: int | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        inference_params: InferenceCache | None,
    ) -> bool:
        """Raises on arguments that do not fit each other; returns whether the call continues from states."""
        dims = 3 if seqlen is None else 2
        check_input("Mamba2", self, u, self.d_model, ("in_proj", "out_proj"), dims, seq_idx)
        if seq_idx is not None and cu_seqlens is None and inference_params is not None:
            raise ValueError("Mamba2: with inference_params packed sequences are given by cu_seqlens, not by seq_idx")
        continues = is_continued("Mamba2", inference_params)
        if continues and cu_seqlens is not None:
            raise ValueError(
                "Mamba2: cu_seqlens is for the first call with inference_params, not for one that continues"
            )
        return continues

    def _route(self, infers: bool, steps_once: bool) -> _Route:
        """The way that a call takes: with states of inference, by one token; the rest is what the layer is made of."""
        if steps_once:
            return "step"
        if self.context_parallel_group is not None:
            return "across ranks"
        if infers or not self._may_fuse():
            return "by parts"
        if not is_plain(self.out_proj, nn.Linear if self.process_group is None else RowParallelLinear):
            return "up to out_proj"
        if self.process_group is None and is_plain(self.in_proj, nn.Linear):
            return "one node"
        return "through out_proj"

    def _step_from_cache(self, u: torch.Tensor, inference_params: InferenceCache) -> torch.Tensor:
        rows = u.shape[0] * (self.world_size if self.sequence_parallel else 1)
        cached = self._get_states_from_cache(inference_params, rows)
        own = type(self).step is Mamba2.step  # and not a subclass's
        return self._step(u, *cached) if own else self.step(u, *cached)[0]

    @torch.no_grad()
    def step(
        self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One token: hidden_states (B, 1, d_model) -> (out, conv_state, ssm_state), the states updated in place.

        conv_state (B, channels, d_conv), ssm_state (B, H, headdim, d_state). No gradient is recorded.
        """
        self._check_step(hidden_states, conv_state, ssm_state)
        return self._step(hidden_states, conv_state, ssm_state), conv_state, ssm_state

    def differentiable_step(
        self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """step to train through (recurrent training, reinforcement learning): the results have gradients, the states
        among them are new, and the given ones are left as they are.
        """
        self._check_step(hidden_states, conv_state, ssm_state)
        z0, x0, z, xBC, dt = self._split(self.in_proj(hidden_states.squeeze(1)))
        xBC, conv_state = convolve_differentiable_step(self.conv1d, xBC, conv_state, self.activation)
        y, ssm_state = selective_state_step(ssm_state, *self._step_inputs(xBC, dt, z))
        return self.out_proj(self._norm_and_mlp(y.flatten(1), z, z0, x0)).unsqueeze(1), conv_state, ssm_state

    def _check_step(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> None:
        check_input("Mamba2", self, hidden_states, self.d_model, ("in_proj", "out_proj"))
        if hidden_states.shape[1] != 1:
            raise ValueError(f"Mamba2: a step takes one token, (B, 1, d_model), got {tuple(hidden_states.shape)}")
        self._check_states(conv_state, ssm_state)

    @torch.no_grad()
    def _step(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """step's output; its arguments were checked."""
        return self._step_after(project(self.in_proj, hidden_states.squeeze(1)), conv_state, ssm_state)

    def _step_after(self, zxbcdt: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        if is_plain(self.conv1d, nn.Conv1d) and self.activation is not None:
            y = self._step_inside(zxbcdt, conv_state, ssm_state)
        else:
            y = self._step_by_parts(zxbcdt, conv_state, ssm_state)
        return project(self.out_proj, y).unsqueeze(1)

    def _step_inside(self, zxbcdt: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """(B, d_inner), by one operator; a norm that is more than its parameters is called behind it."""
        d_mlp = self.d_inner - self.d_ssm
        mlp, zxbcdt = (None, zxbcdt) if d_mlp == 0 else (zxbcdt[:, : 2 * d_mlp], zxbcdt[:, 2 * d_mlp :])
        fuse_norm = self.rmsnorm and self._has_plain_norm()
        conv1d_weight, conv1d_bias = weight_and_bias(self.conv1d)
        y = mamba2_step(
            zxbcdt,
            conv_state,
            ssm_state,
            conv1d_weight.squeeze(1),
            conv1d_bias,
            self.dt_bias,
            self.A_log,
            self._D(),
            self.norm.weight if fuse_norm else None,
            ngroups=self.ngroups,
            dt_limit=self.dt_limit,
            gate=not self.rmsnorm,
            rmsnorm_eps=self.norm.eps if fuse_norm else 0.0,
            norm_before_gate=self.norm_before_gate,
        )
        if self.rmsnorm and not fuse_norm:
            y = self.norm(y, zxbcdt[:, : self.d_ssm])
        if mlp is None:
            return y
        z0, x0 = mlp.chunk(2, dim=1)
        return torch.cat([F.silu(z0) * x0, y], dim=1)

    def _step_by_parts(self, zxbcdt: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """(B, d_inner), by a call of the convolution, which is more than its parameters."""
        z0, x0, z, xBC, dt = self._split(zxbcdt)
        xBC = convolve_step(self.conv1d, xBC, conv_state, self.activation)
        y = selective_state_update(ssm_state, *self._step_inputs(xBC, dt, z))
        return self._norm_and_mlp(y.flatten(1), z, z0, x0)

    def _step_inputs(self, xBC: torch.Tensor, dt: torch.Tensor, z: torch.Tensor) -> typing.Any:
        """What the update of the state takes: x, dt, A, B, C, D, z."""
        x, B, C = self._split_xBC(xBC)
        heads = (self.nheads, self.headdim)
        dt = clamp(F.softplus(dt.float() + self.dt_bias.float()), *self.dt_limit)
        dt, A = dt[:, :, None].expand(x.shape), self._A()[:, None, None].expand(*heads, self.d_state)
        D = self._D() if self.D_has_hdim else self.D[:, None].expand(heads)
        return x, dt, A, B, C, D, None if self.rmsnorm else z.unflatten(-1, heads)

    def _steps_by_in_proj(self) -> bool:
        return is_bare(self, Mamba2) and type(self).step is Mamba2.step

    def as_layer(self, norm: Norm, u: torch.Tensor) -> Layer | None:
        """forward(norm(u + residual)) for an autograd node; None where it has to be called."""
        if not is_bare(self, Mamba2) or self._route(infers=False, steps_once=False) != "one node":
            return None
        check_input("Mamba2", self, u, self.d_model, ("in_proj", "out_proj"))
        inputs = self._block_inputs(u, None)
        return Layer(mamba2_node, norm, inputs[1:], self._options()) if wants_one_node(inputs) else None

    def _as_one_node(
        self, u: torch.Tensor, seq_idx: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        """The whole block in one autograd node, from parameters of projections that are nothing more than that."""
        if cu_seqlens is not None:
            _, seq_idx = self._packed(cu_seqlens, u)
        return mamba2_block(self._block_inputs(u, seq_idx), self._options())

    def _block_inputs(self, u: torch.Tensor, seq_idx: torch.Tensor | None) -> BlockInputs:
        return BlockInputs(
            u,
            *weight_and_bias(self.in_proj),
            *weight_and_bias(self.out_proj),
            *weight_and_bias(self.conv1d),
            self.dt_bias,
            self.A_log,
            self._D(),
            seq_idx,
            self._norm_weight_and_eps()[0],
        )

    def _options(self) -> Options:
        dt_min, dt_max = self.dt_limit
        return Options(
            self.headdim,
            self.ngroups,
            float(dt_min),
            float(dt_max),
            wants_silu("Mamba2", self.activation),
            self._norm_weight_and_eps()[1],
            self.norm_before_gate,
            A_is_log=True,
        )

    def _packed(self, cu_seqlens: torch.Tensor, zxbcdt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cu_seqlens as int32, and the seq_idx that it stands for."""
        check_cu_seqlens("Mamba2", cu_seqlens, zxbcdt)
        positions = torch.arange(zxbcdt.shape[1], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        seq_idx = torch.bucketize(positions, cu_seqlens[1:], right=True, out_int32=True)
        return cu_seqlens.to(torch.int32), seq_idx[None]

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero states (conv_state, ssm_state) of a batch, of dtype or of conv1d's."""
        # projections may be quantised, and a submodule's parameters elsewhere (offloading) until it is called
        factory: dict[str, typing.Any] = {"device": self.A_log.device, "dtype": dtype or self.conv1d.weight.dtype}
        conv_state = torch.zeros(batch_size, self.d_conv, self.conv1d.weight.shape[0], **factory).transpose(1, 2)
        return conv_state, torch.zeros(batch_size, *self._ssm_state_shape(), **factory)

    def _ssm_state_shape(self) -> tuple[int, ...]:
        return self.nheads, self.headdim, self.d_state
