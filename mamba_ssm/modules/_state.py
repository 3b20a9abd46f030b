"""What the state space blocks share of their states: those of inference, and where dt starts."""

import math
import typing

import torch
import torch.nn as nn

from mamba_ssm import _checks as checks
from mamba_ssm._arguments import check_number, is_number, shown
from mamba_ssm.modules._inputs import is_continued
from mamba_ssm.modules.inference import InferenceCache
from mamba_ssm.modules.quantized import StepNorm, project_normed


class StatefulBlock(nn.Module):
    """A block whose inference states, conv_state (B, channels, d_conv) and ssm_state, wait in a cache between calls."""

    layer_idx: int | None  # key of the cache
    in_proj: nn.Linear

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero states (conv_state, ssm_state) of a batch, of dtype or of conv1d's."""
        raise NotImplementedError

    def _ssm_state_shape(self) -> tuple[int, ...]:
        """Of one row of the batch."""
        raise NotImplementedError

    def _steps_by_in_proj(self) -> bool:
        """Whether a call of a step from the cache is _step_after of in_proj's output, and nothing that others added."""
        raise NotImplementedError

    def _step_after(self, projected: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> torch.Tensor:
        """A step's output (B, 1, d_model) from in_proj's (B, ...); the states are updated in place."""
        raise NotImplementedError

    def step_after_norm(
        self, norm: StepNorm, hidden_states: torch.Tensor, inference_params: InferenceCache
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(forward(norm(hidden_states + residual)), the sum) of one row's step if in_proj takes the norm, else None."""
        if not self._steps_by_in_proj() or not is_continued(type(self).__name__, inference_params):
            return None
        together = project_normed(self.in_proj, norm, hidden_states)
        if together is None:
            return None
        projected, total = together
        return self._step_after(projected, *self._get_states_from_cache(inference_params, 1)), total

    def _get_states_from_cache(
        self, inference_params: InferenceCache, batch_size: int, initialize_states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This layer's (conv_state, ssm_state) in the cache, made if they are not there yet."""
        states = states_in_cache(self, self.layer_idx, inference_params, batch_size)
        if initialize_states:
            for state in states:
                state.zero_()
        return states

    def _check_states(self, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> None:
        """Before one is written: operators take one in the other's place, or blame what they compare it with."""
        name, shape = type(self).__name__, self._ssm_state_shape()
        checks.check_tensor(name, "conv_state", conv_state)
        checks.check_tensor(name, "ssm_state", ssm_state)
        if ssm_state.shape[1:] != shape:
            sizes = ", ".join(map(str, shape))
            cure = "; conv_state, which comes first, has it: are they swapped?" if conv_state.shape[1:] == shape else ""
            raise ValueError(f"{name}: ssm_state must have shape (B, {sizes}), got {tuple(ssm_state.shape)}{cure}")


def states_in_cache(
    block: typing.Any, layer_idx: int | None, inference_params: InferenceCache, batch_size: int
) -> typing.Any:
    """The tuple of block's states in the cache, made if it is not there yet."""
    name = type(block).__name__
    if layer_idx is None:
        raise ValueError(f"{name}: layer_idx must be given to the constructor to use inference_params")
    cache = inference_params.key_value_memory_dict
    if layer_idx not in cache:
        cache[layer_idx] = block.allocate_inference_cache(batch_size, 0)
    states = cache[layer_idx]
    block._check_states(*states)
    device = block.D.device
    for state in states:
        if state.device != device:  # copied there, they would be lost on a meta device
            raise ValueError(
                f"{name}: the states in the cache must be on {device} like the layer, got {state.device}: make the "
                "cache with allocate_inference_cache after the layer was moved"
            )
    rows = states[0].shape[0]
    if rows != batch_size:  # a batch of 1 would spread over all rows in silence
        raise ValueError(f"{name}: the cache holds states of a batch of {rows}, got a batch of {batch_size}")
    return states


def mark(parameter: nn.Parameter, name: str) -> None:
    """Sets an attribute that optimizers (_no_weight_decay) or initialisations (_no_reinit) look for."""
    setattr(parameter, name, True)


def is_shape_only(start: torch.Tensor) -> bool:
    """Whether a parameter that is being made is on the meta device. There is nothing to compute, and the first function
    would import half of torch's compiler: a second of from_pretrained, which makes a layer there.
    """
    return start.is_meta


def initial_dt_bias(
    size: int, dt_min: float, dt_max: float, dt_init_floor: float, device: torch.device | str | int | None
) -> torch.Tensor:
    """(size) float32, so that softplus of it is log-uniform in [dt_min, dt_max] and at least dt_init_floor."""
    if not all(map(is_number, (dt_min, dt_max, dt_init_floor))) or not (min(dt_min, dt_max) > 0 <= dt_init_floor):
        raise ValueError(
            "dt_min and dt_max must be positive, dt_init_floor 0 or more, all finite, "
            f"got {shown(dt_min)}, {shown(dt_max)} and {shown(dt_init_floor)}"
        )
    low, high = math.log(dt_min), math.log(dt_max)
    dt = torch.rand(size, device=device, dtype=torch.float32)
    if is_shape_only(dt):
        return dt
    dt = torch.exp(dt * (high - low) + low).clamp(min=dt_init_floor)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def init_dt_proj(
    dt_proj: nn.Linear, dt_min: float, dt_max: float, dt_init: str, dt_scale: float, dt_init_floor: float
) -> None:
    """Where Mamba's dt_proj, of dt_rank features, starts: softplus(its bias) log-uniform in [dt_min, dt_max]."""
    check_number("Mamba", "dt_scale", dt_scale, least=0)
    std = dt_proj.in_features**-0.5 * dt_scale
    if dt_init == "constant":
        nn.init.constant_(dt_proj.weight, std)
    elif dt_init == "random":
        nn.init.uniform_(dt_proj.weight, -std, std)
    else:
        raise ValueError(f"Mamba: dt_init must be 'random' or 'constant', got {shown(dt_init)}")
    bias = dt_proj.bias
    with torch.no_grad():
        bias.copy_(initial_dt_bias(dt_proj.out_features, dt_min, dt_max, dt_init_floor, bias.device))
    mark(bias, "_no_reinit")
