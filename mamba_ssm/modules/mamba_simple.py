"""The Mamba-1 block (Mamba, arXiv 2312.00752, figure 3), with upstream's parameter names, shapes and states."""

import functools
import math
import typing

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm._arguments import check_flags, check_integer, check_number, inner_width
from mamba_ssm._native import abi
from mamba_ssm._torch import autocast_dtype, is_bare, is_plain, wants_one_node, weight_and_bias
from mamba_ssm.distributed.across_ranks import mamba_across_ranks, selective_scan_across_ranks
from mamba_ssm.modules._bimamba import both_ways, type_of
from mamba_ssm.modules._block_without_mlp import Block as Block  # where it was in 1.x
from mamba_ssm.modules._inputs import (
    check_input,
    check_projections,
    is_continued,
    refuse_decoding,
    refuse_with_context_parallel,
)
from mamba_ssm.modules._state import StatefulBlock, init_dt_proj, is_shape_only, mark
from mamba_ssm.modules._submodules import (
    conv_widths,
    convolve,
    convolve_across_ranks,
    convolve_differentiable_step,
    convolve_step,
    project_channels,
    times_channels,
)
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.padding import Padding, masked
from mamba_ssm.modules.quantized import QuantizedLinear
from mamba_ssm.ops.block_node import Layer, Norm
from mamba_ssm.ops.linear import project
from mamba_ssm.ops.mamba_block import BlockInputs, mamba_block, mamba_inner_fn, mamba_node, project_in
from mamba_ssm.ops.mamba_step import mamba_step
from mamba_ssm.ops.selective_scan import selective_scan_fn
from mamba_ssm.ops.state_update import selective_state_step, selective_state_update


class Mamba(StatefulBlock):
    """Mamba block: (B, L, d_model) -> (B, L, d_model).

    Args:
        d_model: width of input and output. d_state: states per channel (N). d_conv: width of the convolution, 2..4.
        expand: channels per model dimension; d_inner = expand * d_model.
        dt_rank: rank of dt's projection; "auto" is ceil(d_model / 16).
        dt_min, dt_max, dt_init_floor: range of dt at initialisation.
        dt_init ("random" or "constant"), dt_scale: initialisation of dt_proj.weight.
        conv_bias, bias: bias of the convolution; of in_proj and out_proj.
        use_fast_path: train through one autograd node, which saves memory; not while one of the projections is replaced
            (LoRA, quantisation) or has hooks, which are then called.
        layer_idx: key of the inference cache.
        bimamba_type: "none" sees what came before, as upstream's; the others see a sequence from both ends, as Vision
            Mamba's, VideoMamba's and SegMamba's, with their parameter names, and cannot decode. "v1" adds a scan
            backwards in time with an A of its own, "v2" a whole direction, "v3" to that a third one that goes through
            the first steps of nslices slices of the length, then through their second ones, and so on.
        bimamba: True is bimamba_type="v2". if_divide_out (if_devide_out): v2 takes the mean of its directions.
        init_layer_scale: the output is scaled by a parameter gamma (d_model) that starts there; None: no gamma.
    """

    int8_weights = "in_proj", "x_proj", "x_proj_b", "x_proj_s", "out_proj"
    context_parallel_group: "dist.ProcessGroup | None" = None  # which mamba_ssm.distributed.context_parallel sets
    conv1d: nn.Conv1d
    x_proj: nn.Linear
    dt_proj: nn.Linear
    A_log: nn.Parameter
    D: nn.Parameter

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | typing.Literal["auto"] = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: typing.Literal["random", "constant"] = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bimamba_type: typing.Literal["none", "v1", "v2", "v3"] = "none",
        bimamba: bool = False,
        if_divide_out: bool = False,
        if_devide_out: bool = False,
        init_layer_scale: float | None = None,
        nslices: int = 5,
    ) -> None:
        super().__init__()
        factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
        self.d_inner = inner_width("Mamba", expand, d_model)
        check_integer("Mamba", "d_state", d_state, most=abi.MAX_DSTATE)
        check_integer("Mamba", "d_conv", d_conv, *conv_widths())
        check_flags("Mamba", conv_bias=conv_bias, bias=bias, use_fast_path=use_fast_path, bimamba=bimamba)
        check_flags("Mamba", if_divide_out=if_divide_out, if_devide_out=if_devide_out)
        check_integer("Mamba", "nslices", nslices)
        self.bimamba_type = type_of(bimamba_type, bimamba)
        self.if_divide_out = if_divide_out or if_devide_out
        self.nslices = nslices
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx
        check_integer("Mamba", "dt_rank (unless 'auto')", self.dt_rank)

        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **factory)
        self.activation = "silu"
        self.act = nn.SiLU()
        of_dt = dt_min, dt_max, dt_init, dt_scale, dt_init_floor
        self._add_direction("", conv_bias, of_dt, factory)
        # after dt's draws, as upstream has it: the same seed gives the same weights
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)
        self._add_scan_parameters("", device)
        if self.bimamba_type == "v1":
            self._add_A_log("_b", device)
        for suffix in {"v2": ("_b",), "v3": ("_b", "_s")}.get(self.bimamba_type, ()):
            self._add_direction(suffix, conv_bias, of_dt, factory)
            self._add_scan_parameters(suffix, device)
        self.layer_scale = init_layer_scale is not None
        if init_layer_scale is not None:
            check_number("Mamba", "init_layer_scale", init_layer_scale)
            self.gamma = nn.Parameter(torch.full((d_model,), float(init_layer_scale), **factory))

    def _add_direction(
        self,
        suffix: str,
        conv_bias: bool,
        of_dt: tuple[float, float, str, float, float],
        factory: dict[str, typing.Any],
    ) -> None:
        """conv1d, x_proj and dt_proj; dt starts as of_dt (dt_min, dt_max, dt_init, dt_scale, dt_init_floor) says."""
        channels, width = self.d_inner, self.d_conv
        conv1d = nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=conv_bias, **factory)
        setattr(self, f"conv1d{suffix}", conv1d)
        x_proj = nn.Linear(channels, self.dt_rank + 2 * self.d_state, bias=False, **factory)
        setattr(self, f"x_proj{suffix}", x_proj)
        dt_proj = nn.Linear(self.dt_rank, channels, bias=True, **factory)
        setattr(self, f"dt_proj{suffix}", dt_proj)
        init_dt_proj(dt_proj, *of_dt)

    def _add_A_log(self, suffix: str, device: typing.Any) -> None:
        logs = torch.empty(self.d_inner, self.d_state, dtype=torch.float32, device=device)
        if not is_shape_only(logs):
            logs.copy_(torch.log(torch.arange(1, self.d_state + 1, dtype=torch.float32, device=device)))
        A_log = nn.Parameter(logs)
        mark(A_log, "_no_weight_decay")
        setattr(self, f"A{suffix}_log", A_log)

    def _add_scan_parameters(self, suffix: str, device: typing.Any) -> None:
        self._add_A_log(suffix, device)
        D = nn.Parameter(torch.ones(self.d_inner, device=device, dtype=torch.float32))
        mark(D, "_no_weight_decay")
        setattr(self, f"D{suffix}", D)

    def forward(
        self,
        hidden_states: torch.Tensor,
        inference_params: InferenceCache | None = None,
        seq_idx: torch.Tensor | None = None,
        attention_mask: torch.Tensor | Padding | None = None,
        *,
        extra_emb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states (B, L, d_model) -> the same shape.

        inference_params: an object with key_value_memory_dict and seqlen_offset. With offset 0 the call fills this
            layer's states there; with a positive one it continues from these states, by a step (L = 1) or a piece.
        seq_idx: (B, L) int32; sequences packed in one row do not see each other. Not with inference_params.
        attention_mask: (B, L) bool or integers, 1 at real steps, 0 at padding before or behind them. Padding does not
            change states and gives zeros. Not with seq_idx; with inference_params for the first call alone.
        extra_emb: None. Pan-Mamba's v3 takes it, which is another layer than this one's.
        """
        if extra_emb is not None:
            raise TypeError(
                "Mamba: extra_emb is an argument of Pan-Mamba's bimamba_type='v3', and here v3 is SegMamba's, another "
                "layer: use the Mamba of Pan-Mamba's own mamba_simple.py, which finds its functions in this package"
            )
        check_input("Mamba", self, hidden_states, self.d_model, ("in_proj", "out_proj"), seq_idx=seq_idx)
        if attention_mask is not None:
            run = functools.partial(self._run, inference_params, None)
            excluded = {"seq_idx": seq_idx, "context_parallel": self.context_parallel_group}
            return masked("Mamba", hidden_states, attention_mask, inference_params, run, excluded)
        return self._run(inference_params, seq_idx, hidden_states)

    def _run(
        self,
        inference_params: InferenceCache | None,
        seq_idx: torch.Tensor | None,
        hidden_states: torch.Tensor,
        padding: Padding | None = None,
    ) -> torch.Tensor:
        """forward; hidden_states were checked."""
        if self.bimamba_type != "none":
            if inference_params is not None:
                self._check_causal()
            if self.context_parallel_group is not None:
                raise ValueError(
                    f"Mamba: context_parallel is for causal layers, got {self.bimamba_type!r} as bimamba_type"
                )
            return self._scaled(both_ways(self, self._project_in(hidden_states), seq_idx, padding))
        if inference_params is not None and seq_idx is not None:
            raise ValueError("Mamba: seq_idx and inference_params cannot be given together")
        continues = is_continued("Mamba", inference_params)
        if inference_params is not None and continues and hidden_states.shape[1] == 1:
            states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
            if type(self).step is not Mamba.step:  # a subclass's
                return self.step(hidden_states, *states)[0]
            return self._step(hidden_states, *states)
        return self._scaled(self._forwards(hidden_states, inference_params, continues, seq_idx, padding))

    def _scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out * self.gamma.to(out.dtype) if self.layer_scale else out

    def _check_causal(self) -> None:
        if self.bimamba_type != "none":
            refuse_decoding("Mamba", f"bimamba_type={self.bimamba_type!r}")

    def _forwards(
        self,
        hidden_states: torch.Tensor,
        inference_params: InferenceCache | None,
        continues: bool,
        seq_idx: torch.Tensor | None,
        padding: Padding | None,
    ) -> torch.Tensor:
        """forward in one direction, before gamma, of no single step."""
        conv_state = ssm_state = None
        if inference_params is not None:
            conv_state, ssm_state = self._get_states_from_cache(inference_params, hidden_states.shape[0])

        if self.context_parallel_group is not None:
            refuse_with_context_parallel("Mamba", inference_params=inference_params, seq_idx=seq_idx)
            return self._across_ranks(hidden_states, self.context_parallel_group)
        whole = conv_state is None and seq_idx is None and padding is None
        if self.use_fast_path and whole and self._is_plain():
            return self._fast_path(hidden_states)
        xz = self._project_in(hidden_states)
        A = -torch.exp(self.A_log.float())
        x, z = xz.chunk(2, dim=1)
        # behind it x is zero at padding, which then adds nothing to the state: the scan need not know of it
        x = convolve(self.conv1d, x, self.activation, seq_idx, conv_state, continues, padding=padding)
        check_projections("Mamba", self, x, ("x_proj", "dt_proj"))
        x_dbl = self.x_proj(x.transpose(1, 2))
        dt, B, C = torch.split(x_dbl, [self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt, dt_bias = self._project_dt(dt)
        dt = dt.transpose(1, 2)
        y: typing.Any = selective_scan_fn(
            x.to(dt.dtype),
            dt,
            A,
            B.transpose(1, 2),
            C.transpose(1, 2),
            self.D.float(),
            z=z.to(dt.dtype),
            delta_bias=dt_bias,
            delta_softplus=True,
            return_last_state=ssm_state is not None,
            initial_state=ssm_state.clone() if continues and ssm_state is not None else None,
            seq_idx=seq_idx,
        )
        if ssm_state is not None:
            y, last_state = y
            with torch.no_grad():
                ssm_state.copy_(last_state)
        return self.out_proj(y.transpose(1, 2))

    def _across_ranks(self, hidden_states: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
        """forward of this rank's part of the sequence; see mamba_ssm.distributed.context_parallel."""
        if self.use_fast_path and self._is_plain() and is_plain(self.in_proj, nn.Linear):
            return mamba_across_ranks(self._block_inputs(hidden_states), group)
        x, z = self._project_in(hidden_states).chunk(2, dim=1)
        x = convolve_across_ranks(self.conv1d, x, self.activation, group)
        dt, B, C = project_channels(self.x_proj, x).split([self.dt_rank, self.d_state, self.d_state], dim=1)
        plain = is_plain(self.dt_proj, nn.Linear)  # then the scan adds the bias, in float32
        dt = times_channels(self.dt_proj.weight, dt) if plain else project_channels(self.dt_proj, dt)
        x, B, C, z = (tensor.to(dt.dtype) for tensor in (x, B, C, z))
        A, dt_bias = -torch.exp(self.A_log.float()), self.dt_proj.bias if plain else None
        y = selective_scan_across_ranks(x, dt, A, B, C, self.D, z, dt_bias, True, group)
        return self.out_proj(y.transpose(1, 2))

    def _is_plain(self) -> bool:
        """Whether all that the fused operator computes is in the parameters it takes."""
        projections = self.x_proj, self.dt_proj, self.out_proj
        plain = is_plain(self.conv1d, nn.Conv1d) and all(is_plain(module, nn.Linear) for module in projections)
        return plain and self.x_proj.bias is None

    def _steps_by_in_proj(self) -> bool:
        return is_bare(self, Mamba) and self.bimamba_type == "none" and type(self).step is Mamba.step

    def as_layer(self, norm: Norm, hidden_states: torch.Tensor) -> Layer | None:
        """forward(norm(hidden_states + residual)) for an autograd node; None where it has to be called."""
        if not (is_bare(self, Mamba) and self.bimamba_type == "none" and not self.layer_scale):
            return None
        check_input("Mamba", self, hidden_states, self.d_model, ("in_proj", "out_proj"))
        if self.context_parallel_group is not None or not self.use_fast_path:
            return None
        if not (self._is_plain() and is_plain(self.in_proj, nn.Linear)):
            return None
        inputs = self._block_inputs(hidden_states)
        return Layer(mamba_node, norm, inputs[1:], ()) if wants_one_node(inputs) else None

    def _fast_path(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if is_plain(self.in_proj, nn.Linear):
            return mamba_block(self._block_inputs(hidden_states))
        dt_proj_weight, dt_bias = weight_and_bias(self.dt_proj)
        projections = self.x_proj.weight, dt_proj_weight, *weight_and_bias(self.out_proj)
        inner = *weight_and_bias(self.conv1d), *projections
        A = -torch.exp(self.A_log.float())
        xz = self._project_in(hidden_states)
        return mamba_inner_fn(xz, *inner, A, D=self.D.float(), delta_bias=dt_bias.float())

    def _block_inputs(self, hidden_states: torch.Tensor) -> BlockInputs:
        dt_proj_weight, dt_bias = weight_and_bias(self.dt_proj)
        return BlockInputs(
            hidden_states,
            *weight_and_bias(self.in_proj),
            *weight_and_bias(self.conv1d),
            self.x_proj.weight,
            dt_proj_weight,
            *weight_and_bias(self.out_proj),
            self.A_log,
            self.D,
            dt_bias,
        )

    def _project_in(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """in_proj as (B, 2 d_inner, L), in memory (2 d_inner, B, L): each channel's time line is contiguous."""
        if not is_plain(self.in_proj, nn.Linear):
            return self.in_proj(hidden_states).transpose(1, 2)
        return project_in(hidden_states, self.in_proj.weight, self.in_proj.bias)

    def _project_dt(self, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dt_proj, and its bias if that is still to be added, which the scan does in float32."""
        if is_plain(self.dt_proj, nn.Linear):
            return F.linear(dt, self.dt_proj.weight), self.dt_proj.bias
        return self.dt_proj(dt), None

    @torch.no_grad()
    def step(
        self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One token: hidden_states (B, 1, d_model) -> (out, conv_state, ssm_state), the states updated in place.

        conv_state (B, d_inner, d_conv), ssm_state (B, d_inner, d_state). No gradient is recorded.
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
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=-1)
        x, conv_state = convolve_differentiable_step(self.conv1d, x, conv_state, self.activation)
        dt, B, C = torch.split(self.x_proj(x), [self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt, dt_bias = self._project_dt(dt)
        A = -torch.exp(self.A_log.float())
        y, ssm_state = selective_state_step(ssm_state, x, dt, A, B, C, self.D, z, dt_bias, dt_softplus=True)
        return self._scaled(self.out_proj(y).unsqueeze(1)), conv_state, ssm_state

    def _check_step(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> None:
        self._check_causal()
        check_input("Mamba", self, hidden_states, self.d_model, ("in_proj", "out_proj"))
        if hidden_states.shape[1] != 1:
            raise ValueError(f"Mamba: a step takes one token, (B, 1, d_model), got {tuple(hidden_states.shape)}")
        self._check_states(conv_state, ssm_state)

    @torch.no_grad()
    def _step(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """step's output; its arguments were checked."""
        return self._step_after(project(self.in_proj, hidden_states.squeeze(1)), conv_state, ssm_state)

    def _step_after(self, xz: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        x_proj, dt_proj, conv1d = self.x_proj, self.dt_proj, self.conv1d
        plain = is_plain(x_proj, nn.Linear) or is_plain(x_proj, QuantizedLinear)
        plain = plain and is_plain(dt_proj, nn.Linear) and is_plain(conv1d, nn.Conv1d)
        if plain and x_proj.bias is None and self.dt_rank <= abi.MAX_DT_RANK:
            y = self._step_inside(xz, conv_state, ssm_state)
        else:
            y = self._step_by_parts(xz, conv_state, ssm_state)
        return self._scaled(project(self.out_proj, y).unsqueeze(1))

    def _step_inside(self, xz: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """(B, d_inner), by one operator."""
        conv1d_weight, conv1d_bias = weight_and_bias(self.conv1d)
        x_proj_weight, (dt_proj_weight, dt_bias) = self.x_proj.weight, weight_and_bias(self.dt_proj)
        scales = self.x_proj.scales if isinstance(self.x_proj, QuantizedLinear) else None
        if autocast_dtype(xz) is not None:  # as it does for a linear layer
            x_proj_weight = x_proj_weight if scales is not None else x_proj_weight.to(xz.dtype)
            dt_proj_weight = dt_proj_weight.to(xz.dtype)
        return mamba_step(
            xz,
            conv_state,
            ssm_state,
            conv1d_weight.squeeze(1),
            conv1d_bias,
            x_proj_weight,
            dt_proj_weight,
            dt_bias,
            self.A_log,
            self.D,
            scales,
        )

    def _step_by_parts(self, xz: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """(B, d_inner), by a call of each submodule that is more than its parameters."""
        x, z = xz.chunk(2, dim=-1)
        x = convolve_step(self.conv1d, x, conv_state, self.activation)
        dt, B, C = torch.split(self.x_proj(x), [self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt, dt_bias = self._project_dt(dt)
        A = -torch.exp(self.A_log.float())
        return selective_state_update(ssm_state, x, dt, A, B, C, self.D, z=z, dt_bias=dt_bias, dt_softplus=True)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero states (conv_state, ssm_state) of a batch, of dtype or of conv1d's."""
        self._check_causal()
        # projections may be quantised, and a submodule's parameters elsewhere (offloading) until it is called
        device, dtype = self.A_log.device, self.conv1d.weight.dtype if dtype is None else dtype
        conv_state = torch.zeros(batch_size, self.d_inner, self.d_conv, device=device, dtype=dtype)
        return conv_state, torch.zeros(batch_size, *self._ssm_state_shape(), device=device, dtype=dtype)

    def _ssm_state_shape(self) -> tuple[int, ...]:
        return self.d_inner, self.d_state
