"""What models of int8 weights have beyond others: a field of config.json, scales beside the weights, a step's head."""

import typing
from collections.abc import Mapping
from pathlib import Path

import torch

from mamba_ssm._arguments import first_few, shown
from mamba_ssm._torch import is_bare, is_compiling, is_plain
from mamba_ssm.models._fit import Shapes
from mamba_ssm.modules.block import through_layers
from mamba_ssm.modules.quantized import SCALES, WEIGHT, QuantizedLinear, StepNorm, project_normed
from mamba_ssm.ops.linear import project, scales_shape
from mamba_ssm.ops.norm import RMSNorm
from mamba_ssm.utils.hf import CheckpointError

QUANTIZATION, INT8 = "quantization", "int8"  # the field of config.json, and its one value


def take_quantization(config: dict[str, typing.Any], source: str) -> bool:
    """Removes the field from the contents of config.json; returns whether weights are int8.

    Raises:
        CheckpointError: another value than "int8".
    """
    if QUANTIZATION not in config:
        return False
    value = config.pop(QUANTIZATION)
    if value != INT8:
        raise CheckpointError(f'{source}: {QUANTIZATION} must be "{INT8}", or left out, got {shown(value)}')
    return True


def quantized_names(state: Mapping[str, torch.Tensor], path: Path) -> list[str]:
    """The modules whose weight is int8 with scales.

    Raises:
        CheckpointError: there is none, or a tensor has another dtype.
    """
    names = [name.removesuffix(SCALES) for name in state if name.endswith(SCALES)]
    if not names:
        raise CheckpointError(
            f'{path} does not fit its config.json: {QUANTIZATION} is "{INT8}" there, but no weight has scales beside it'
        )
    wrong = [
        f"{name}{suffix} {str(state[name + suffix].dtype)[6:]}"
        for name in names
        for suffix, dtype in ((WEIGHT, torch.int8), (SCALES, torch.float16))
        if name + suffix in state and state[name + suffix].dtype != dtype
    ]
    if wrong:
        raise CheckpointError(f"{path}: a weight with scales must be int8, and they float16, got {first_few(wrong)}")
    return names


def without_quantized(state: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """state without the weights and scales of these modules."""
    skipped = {name + suffix for name in names for suffix in (WEIGHT, SCALES)}
    return {name: tensor for name, tensor in state.items() if name not in skipped}


def shapes_of_scales(expected: Shapes, names: list[str]) -> Shapes:
    """{name: shape} of the scales that belong to expected's weights; those of others stay unexpected."""
    weights = {name + SCALES: expected.get(name + WEIGHT, ()) for name in names}
    return {name: scales_shape(shape) for name, shape in weights.items() if len(shape) == 2}


def step_by_int8_head(model: typing.Any, input_ids: torch.Tensor, inference_params: typing.Any) -> torch.Tensor | None:
    """The logits (1, 1, vocabulary) of one token on a GPU, the last norm and the head as one kernel; None where the
    model's modules have to be called.

    model: a MambaLMHeadModel with a MixerModel as its backbone.
    """
    backbone, head, norm = model.backbone, model.lm_head, model.backbone.norm_f
    if torch.is_grad_enabled() or is_compiling() or not isinstance(input_ids, torch.Tensor):
        return None
    if not input_ids.is_cuda or input_ids.numel() != 1:
        return None
    if not (is_bare(backbone, type(backbone)) and is_bare(head, QuantizedLinear) and is_plain(norm, RMSNorm)):
        return None
    if not backbone.fused_add_norm:
        return None
    hidden_states, residual = through_layers(backbone.layers, backbone._embed(input_ids), inference_params, {})
    given = StepNorm(residual, norm.weight, float(norm.eps), backbone.residual_in_fp32)
    projected = project_normed(head, given, hidden_states)
    if projected is None:
        logits: torch.Tensor = project(head, backbone._last_norm(hidden_states, residual))
        return logits
    return projected[0][None]
