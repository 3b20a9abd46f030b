"""The Mamba-3 block (arXiv 2603.15569), SISO and MIMO, with upstream's parameter names, shapes and states."""

import functools
import itertools
import typing
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_flags, check_process_group, first_few, inner_width, shown
from mamba_ssm._torch import is_bare, is_plain, traced_by_old_torch, wants_one_node, weight_and_bias
from mamba_ssm.distributed.across_ranks import mamba3_scan_across_ranks
from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear, RowParallelLinear, SharedRMSNorm
from mamba_ssm.modules._inputs import (
    check_cu_seqlens,
    check_input,
    check_projections,
    is_continued,
    refuse_with_context_parallel,
)
from mamba_ssm.modules._mamba3_parts import UpstreamParts
from mamba_ssm.modules._mamba3_settings import check_heads, check_rates, check_sizes
from mamba_ssm.modules._mamba3_states import Mamba3States
from mamba_ssm.modules._state import initial_dt_bias, mark, states_in_cache
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.padding import Padding, masked
from mamba_ssm.ops.activations import clamp, heavy_tail_activation
from mamba_ssm.ops.block_node import Layer, Norm
from mamba_ssm.ops.linear import project
from mamba_ssm.ops.mamba3_block import mamba3_block, mamba3_block_step
from mamba_ssm.ops.mamba3_block.block_arguments import Options
from mamba_ssm.ops.mamba3_block.layer import LayerInputs, mamba3_layer, mamba3_node
from mamba_ssm.ops.mamba3_scan import MOST_CUDA_RANK, States, mamba3_scan, mamba3_step
from mamba_ssm.ops.norm import GatedRMSNorm, RMSNorm


def _weight_of(norm: RMSNorm) -> torch.Tensor:
    """The weight, whose gradient all ranks share that share it."""
    return norm.shared_weight() if isinstance(norm, SharedRMSNorm) else norm.weight


_LAYER_PARAMETERS = LayerInputs._fields[5:-2]  # but for those of the projections
_A_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heavy_tail": heavy_tail_activation,
    "softplus": F.softplus,
}


class Mamba3(UpstreamParts, Mamba3States):
    """Mamba-3 block: (B, L, d_model) -> (B, L, d_model).

    Args:
        d_model: width of input and output. d_state: states per channel (N), 1..256.
        expand: d_inner = expand * d_model channels inside, in heads of headdim (1..256) channels.
        ngroups: groups of B and C, a divisor of the number of heads.
        rope_fraction: the part of B and C that is rotated, from 0 (nothing) to 1.
        dt_min, dt_max, dt_init_floor: range of dt at initialisation. A_floor: -A is at least this.
        is_outproj_norm: RMSNorm over each head, before the gate.
        is_mimo: mimo_rank rows of B, C and the projections mimo_x, mimo_z and mimo_o; without it the rank is 1.
        layer_idx: key of the inference cache.
        fuse_pregate_headwise_norm, chunk_size, dropout, n_layer: for code written for upstream, without effect; so are
            unknown arguments, of which a warning tells.
        A_activation: what makes -A of the projection: "heavy_tail", or "softplus" as in upstream's wheels of May 2026,
            whose checkpoints look the same otherwise.
        process_group: tensor parallel. This rank holds its part of the heads and, unless there is one, of the groups.
            What all heads share is on every rank, with the gradient of all: the norms of B and C, the rows of in_proj
            that make the angles and, of one group, B and C.
        sequence_parallel: with process_group, input and output are this rank's part of the batch; False: they are whole
            on every rank.
    """

    int8_weights = "in_proj", "out_proj"
    context_parallel_group: "dist.ProcessGroup | None" = None  # which mamba_ssm.distributed.context_parallel sets

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        A_activation: str = "heavy_tail",
        process_group: "dist.ProcessGroup | None" = None,
        sequence_parallel: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__()
        if kwargs:
            warnings.warn(f"Mamba3: these arguments have no effect: {first_few(list(kwargs))}", stacklevel=2)
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        check_sizes(d_state, headdim, ngroups, mimo_rank)
        check_rates(A_floor, rope_fraction)
        check_flags("Mamba3", is_outproj_norm=is_outproj_norm, is_mimo=is_mimo, sequence_parallel=sequence_parallel)
        if A_activation not in list(_A_ACTIVATIONS):
            raise ValueError(
                f"Mamba3: A_activation must be one of {', '.join(map(repr, _A_ACTIVATIONS))}, got {shown(A_activation)}"
            )
        self.d_model = d_model
        self.d_state = d_state
        self.expand = expand
        self.headdim = headdim
        self.rope_fraction = rope_fraction
        self.A_floor = A_floor
        self.A_activation = A_activation
        self.is_outproj_norm = is_outproj_norm
        self.is_mimo = is_mimo
        self.mimo_rank = mimo_rank if is_mimo else 1
        self.chunk_size = chunk_size
        self.layer_idx = layer_idx
        check_process_group("Mamba3", process_group)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.world_size = world = 1 if process_group is None else dist.get_world_size(process_group)
        self.local_rank = 0 if process_group is None else dist.get_rank(process_group)
        d_inner = inner_width("Mamba3", expand, d_model)
        nheads = check_heads(d_inner, headdim, ngroups, world)
        # from here on: this rank's part
        self.d_inner, self.nheads = d_inner // world, nheads // world
        B_and_C_shared = ngroups == 1
        self.num_bc_heads = ngroups = max(ngroups // world, 1)
        self.num_rope_angles = int(d_state * rope_fraction) // 2
        self.split_tensor_size = 2 * self.num_rope_angles
        self.rotary_dim_divisor = 2 / rope_fraction if rope_fraction else float("inf")

        heads, rank = self.nheads, self.mimo_rank
        dt_bias = initial_dt_bias(heads, dt_min, dt_max, dt_init_floor, device)
        self.dt_bias = nn.Parameter(dt_bias)
        mark(self.dt_bias, "_no_weight_decay")
        self.B_bias = nn.Parameter(torch.ones(heads, rank, d_state, dtype=torch.float32, device=device))
        self.C_bias = nn.Parameter(torch.ones(heads, rank, d_state, dtype=torch.float32, device=device))
        if is_mimo:
            rows = heads, rank, headdim
            self.mimo_x = nn.Parameter(torch.full(rows, 1 / rank, device=device))
            self.mimo_z = nn.Parameter(torch.ones(rows, device=device))
            self.mimo_o = nn.Parameter(torch.full(rows, 1 / rank, device=device))
        self.D = nn.Parameter(torch.ones(heads, device=device))
        mark(self.D, "_no_weight_decay")
        # in this order: z, x, B, C, dt, A, trap, angles
        matrix = rank * ngroups * d_state
        self._parts = [self.d_inner, self.d_inner, matrix, matrix, heads, heads, heads, self.num_rope_angles]
        if process_group is None:
            self.in_proj = nn.Linear(d_model, sum(self._parts), bias=False, **factory)
            self.B_norm = RMSNorm(d_state, eps=1e-5, **factory)
            self.C_norm = RMSNorm(d_state, eps=1e-5, **factory)
        else:
            parallel: dict[str, typing.Any] = {"bias": False, "sequence_parallel": sequence_parallel, **factory}
            self.in_proj = self._make_in_proj(B_and_C_shared, process_group, parallel)
            self.B_norm = SharedRMSNorm(d_state, process_group, eps=1e-5, **factory)
            self.C_norm = SharedRMSNorm(d_state, process_group, eps=1e-5, **factory)
        if is_outproj_norm:
            self.norm = GatedRMSNorm(self.d_inner, eps=1e-5, group_size=headdim, norm_before_gate=True, **factory)
        if process_group is None:
            self.out_proj = nn.Linear(self.d_inner, d_model, bias=False, **factory)
        else:
            self.out_proj = RowParallelLinear(d_inner, d_model, process_group, **parallel)

    def _make_in_proj(
        self, B_and_C_shared: bool, process_group: "dist.ProcessGroup", parallel: dict[str, typing.Any]
    ) -> ColumnParallelLinear:
        """The parts in the same order on each rank, with its own rows of them or those that all ranks share."""
        ends = list(itertools.accumulate(self._parts))
        shared = [(ends[1], ends[3])] if B_and_C_shared else []
        shared.append((ends[6], ends[7]))
        own = ends[-1] - sum(end - begin for begin, end in shared)
        return ColumnParallelLinear(self.d_model, own * self.world_size, process_group, shared=shared, **parallel)

    def forward(
        self,
        u: torch.Tensor,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inference_params: InferenceCache | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
    ) -> torch.Tensor:
        """u (B, L, d_model) -> the same shape.

        With process_group and sequence_parallel they are this rank's part of the batch; the rest is of the whole batch.

        seq_idx: (B, L) int32; sequences packed in one row do not see each other.
        cu_seqlens: (sequences + 1) int32, the bounds of sequences that are packed in a batch of 1; with it seq_idx is
            not read.
        inference_params: an object with key_value_memory_dict and seqlen_offset. With offset 0 the call fills this
            layer's states there, one row for each of the batch or of the packed sequences; with a positive one it
            continues from these states, by a step (L = 1) or a piece.
        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them. Padding does not
            change states and gives zeros. Not with seq_idx, cu_seqlens or process_group; with inference_params for the
            first call alone.
        """
        check_input("Mamba3", self, u, self.d_model, ("in_proj", "out_proj"), seq_idx=seq_idx)
        if attention_mask is None:
            return self._run(inference_params, seq_idx, cu_seqlens, u)
        excluded: dict[str, object] = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        excluded |= {"process_group": self.process_group, "context_parallel": self.context_parallel_group}
        run = functools.partial(self._run, inference_params, None, None)
        return masked("Mamba3", u, attention_mask, inference_params, run, excluded)

    def _run(
        self,
        inference_params: InferenceCache | None,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        u: torch.Tensor,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """forward; u was checked."""
        continues = is_continued("Mamba3", inference_params)
        if cu_seqlens is not None:
            if continues:
                raise ValueError(
                    "Mamba3: cu_seqlens is for the first call with inference_params, not for one that continues"
                )
            check_cu_seqlens("Mamba3", cu_seqlens, u)
            cu_seqlens, seq_idx = cu_seqlens.to(torch.int32), None
        elif seq_idx is not None and inference_params is not None:
            raise ValueError("Mamba3: with inference_params packed sequences are given by cu_seqlens, not by seq_idx")
        if self.context_parallel_group is not None:
            others: dict[str, typing.Any] = {"process_group": self.process_group, "inference_params": inference_params}
            refuse_with_context_parallel("Mamba3", seq_idx=seq_idx, cu_seqlens=cu_seqlens, **others)
            arguments, z = self._arguments(self.in_proj(u))
            y = mamba3_scan_across_ranks(arguments, self.context_parallel_group)
            return self.out_proj(self._finish(y, z))
        # at padding u is zero, and so is what in_proj makes of it: the scan needs no seq_idx, which wgmma kernels lack
        if padding is not None and not (is_plain(self.in_proj, nn.Linear) and self.in_proj.bias is None):
            seq_idx = padding.seq_idx
        if inference_params is None:
            one_node = self._inputs_of_node(u, seq_idx, cu_seqlens)
            if one_node is not None:
                return mamba3_layer(*one_node)
            return self.out_proj(self._scan(self.in_proj(u), seq_idx=seq_idx, cu_seqlens=cu_seqlens)[0])
        batch = u.shape[0] * (self.world_size if self.sequence_parallel else 1)
        rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = states_in_cache(self, self.layer_idx, inference_params, rows)
        if continues and u.shape[1] == 1:
            if type(self).step is not Mamba3.step:  # a subclass's
                return self.step(u, *states)[0]
            return self._one_token(u.squeeze(1), States(*states)).unsqueeze(1)
        initial_states = States(*(state.to(torch.float32, copy=True) for state in states)) if continues else None
        packing: dict[str, typing.Any] = {"initial_states": initial_states, "cu_seqlens": cu_seqlens}
        y, finals = self._scan(self.in_proj(u), **packing, seq_idx=seq_idx, return_final_states=True)
        with torch.no_grad():
            for state, final in zip(states, typing.cast(States, finals), strict=True):
                if padding is not None:  # a row of nothing else ends with padding's states
                    final = final.masked_fill(~padding.real.any(1).view(-1, *(1,) * (final.dim() - 1)), 0)
                state.copy_(final)
        return self.out_proj(y)

    @torch.no_grad()
    def step(
        self,
        u: torch.Tensor,
        angle_state: torch.Tensor,
        ssm_state: torch.Tensor,
        k_state: torch.Tensor,
        v_state: torch.Tensor,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One token: u (B, d_model) or (B, 1, d_model) -> (out of the same shape, and the states, updated in place).

        The states are allocate_inference_cache's. kwargs: for code written for upstream. No gradient is recorded.
        """
        checks.check_tensor("Mamba3", "the input", u)
        row = u.squeeze(1) if u.dim() == 3 and u.shape[1] == 1 else u
        if row.dim() != 2 or row.shape[1] != self.d_model:
            raise ValueError(
                "Mamba3: a step takes one token, (B, d_model) or (B, 1, d_model) with d_model = "
                f"{self.d_model}, got {tuple(u.shape)}"
            )
        check_projections("Mamba3", self, row, ("in_proj", "out_proj"))
        self._check_states(angle_state, ssm_state, k_state, v_state)
        out = self._one_token(row, States(angle_state, ssm_state, k_state, v_state))
        return out.unsqueeze(1) if u.dim() == 3 else out, angle_state, ssm_state, k_state, v_state

    @torch.no_grad()
    def _one_token(self, row: torch.Tensor, states: States) -> torch.Tensor:
        """step's output (B, d_model); its arguments were checked."""
        return project(self.out_proj, self._step(project(self.in_proj, row), states))

    def as_layer(self, norm: Norm, u: torch.Tensor) -> Layer | None:
        """forward(norm(u + residual)) for an autograd node; None where it has to be called."""
        if not is_bare(self, Mamba3) or self.context_parallel_group is not None:
            return None
        one_node = self._inputs_of_node(u, None, None)
        if one_node is None:
            return None
        check_input("Mamba3", self, u, self.d_model, ("in_proj", "out_proj"))
        inputs, options = one_node
        return Layer(mamba3_node, norm, inputs[1:], options)

    def _inputs_of_node(
        self, u: torch.Tensor, seq_idx: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> tuple[LayerInputs, Options] | None:
        """What the whole layer as one autograd node takes. None if it cannot be one: if projections and norms are more
        than their parameters, or no gradient is wanted.
        """
        if not torch.is_grad_enabled() or traced_by_old_torch() or self._calls_norm() or not self._is_fused():
            return None
        if u.is_cuda and self.mimo_rank > MOST_CUDA_RANK:
            return None
        if not (is_plain(self.in_proj, nn.Linear) and is_plain(self.out_proj, nn.Linear)):
            return None
        given = self._parameters_and_options()
        projections = *weight_and_bias(self.in_proj), *weight_and_bias(self.out_proj)
        others = [given.get(name) for name in _LAYER_PARAMETERS]
        inputs = LayerInputs(*[u, *projections, *others, seq_idx, cu_seqlens])
        options = {name: given[name] for name in Options._fields if name in given}
        options = {"headdim": self.headdim, "norm_eps": 0.0} | options
        return (inputs, Options(**options)) if wants_one_node(inputs) else None

    # ---- from in_proj's output to out_proj's input -------------------------------------------------------------------

    def _scan(self, zxBCdt: torch.Tensor, **options: typing.Any) -> tuple[torch.Tensor, States | None]:
        """(B, L, d_inner), and with return_final_states the states after it. By one operator where that can be; a norm
        that is more than its weight is called before or behind it.
        """
        if self._is_fused() and not (zxBCdt.is_cuda and self.mimo_rank > MOST_CUDA_RANK):
            results: typing.Any = mamba3_block(
                zxBCdt, **self._parameters_and_options(), **options, headdim=self.headdim
            )
            z = self._z_behind(zxBCdt)
        else:
            arguments, z = self._arguments(zxBCdt)
            results = mamba3_scan(**arguments, **options)
        y, states = results if options.get("return_final_states") else (results, None)
        return self._finish(y, z), states

    def _step(self, zxBCdt: torch.Tensor, states: States) -> torch.Tensor:
        """(B, d_inner), by one operator; a norm that is more than its weight is called before or behind it."""
        if not self._is_fused():
            arguments, z = self._arguments(zxBCdt)
            return self._finish(mamba3_step(states, **arguments), z)
        y = mamba3_block_step(zxBCdt, states, **self._parameters_and_options())
        return self._finish(y, self._z_behind(zxBCdt))

    def _is_fused(self) -> bool:
        """Whether the norms of B and C are no more than their weights, so that an operator may take these."""
        return all(
            (is_plain(norm, RMSNorm) or is_plain(norm, SharedRMSNorm))
            and norm.bias is None
            and not (norm.training and norm.dropout_p)
            for norm in (self.B_norm, self.C_norm)
        )

    def _calls_norm(self) -> bool:
        """Whether the norm before the gate is more than its weight, so that it is called behind the operator."""
        return self.is_outproj_norm and not is_plain(self.norm, GatedRMSNorm)

    def _z_behind(self, zxBCdt: torch.Tensor) -> torch.Tensor | None:
        """z, where the gate comes behind the operator."""
        if not self._calls_norm():
            return None
        return zxBCdt[..., : self.d_inner].unflatten(-1, (self.nheads, self.headdim))

    def _parameters_and_options(self) -> dict[str, typing.Any]:
        """What mamba3_block and its step take besides the projection and states."""
        arguments: dict[str, typing.Any] = {
            "dt_bias": self.dt_bias,
            "B_weight": _weight_of(self.B_norm),
            "C_weight": _weight_of(self.C_norm),
            "B_bias": self.B_bias,
            "C_bias": self.C_bias,
            "D": self.D,
            "ngroups": self.num_bc_heads,
            "A_floor": self.A_floor,
            "A_softplus": self.A_activation == "softplus",
            "B_eps": self.B_norm.eps,
            "C_eps": self.C_norm.eps,
            "gate": not self._calls_norm(),
            "pairwise": not self.is_mimo,
        }
        if self.is_mimo:
            arguments["mimo_x"] = self.mimo_x
            if arguments["gate"]:
                arguments.update(mimo_z=self.mimo_z, mimo_o=self.mimo_o)
        if self.is_outproj_norm and arguments["gate"]:
            arguments.update(norm_weight=self.norm.weight, norm_eps=self.norm.eps)
        return arguments

    def _arguments(self, zxBCdt: torch.Tensor) -> tuple[dict[str, typing.Any], torch.Tensor | None]:
        """What the scan and the step take, of (B, L, ...) or (B, ...); and z where a norm that is more than its weight
        comes between them and the gate.
        """
        z, x, B, C, dt, A, trap, angles = zxBCdt.split(self._parts, dim=-1)
        heads, groups = (self.nheads, self.headdim), (self.mimo_rank, self.num_bc_heads, self.d_state)
        z, x = z.unflatten(-1, heads), x.unflatten(-1, heads)
        DT = F.softplus(checks.widen(dt) + checks.widen(self.dt_bias))
        arguments = {
            "Q": self.C_norm(C.unflatten(-1, groups)),
            "K": self.B_norm(B.unflatten(-1, groups)),
            "V": x,
            "ADT": -self._rate(A) * DT,
            "DT": DT,
            "Trap": trap,
            "Q_bias": self.C_bias,
            "K_bias": self.B_bias,
            "Angles": angles,
            "D": self.D,
            "pairwise": not self.is_mimo,
        }
        if self.is_mimo:
            arguments["MIMO_V"] = self.mimo_x
        if self._calls_norm():
            return arguments, z
        arguments["Z"] = z
        if self.is_mimo:
            arguments.update(MIMO_Z=self.mimo_z, MIMO_Out=self.mimo_o)
        if self.is_outproj_norm:
            arguments.update(norm_weight=self.norm.weight.view(heads), norm_eps=self.norm.eps)
        return arguments, None

    def _rate(self, A: torch.Tensor) -> torch.Tensor:
        """-A, float32, of its projection."""
        return clamp(_A_ACTIVATIONS[self.A_activation](checks.widen(A)), self.A_floor)

    def _finish(self, y: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        """out_proj's input, from what the scan and the step return."""
        if z is not None:  # y are rows
            z = z.unsqueeze(-3)
            z = (z * self.mimo_z.transpose(0, 1)).to(y.dtype) if self.is_mimo else z
            y = self.norm(y.flatten(-2), z.flatten(-2)).unflatten(-1, (self.nheads, self.headdim))
            if self.is_mimo:
                return (y * self.mimo_o.transpose(0, 1)).sum(-3).to(y.dtype).flatten(-2)
        return y.flatten(-2) if self.is_mimo else y.squeeze(-3).flatten(-2)
