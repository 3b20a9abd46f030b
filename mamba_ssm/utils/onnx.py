"""Export of blocks, language models and other code on this package's operators to ONNX."""

import importlib.util
import os
import typing
from collections.abc import Iterator

import torch
import torch.nn as nn

from mamba_ssm._torch import reference
from mamba_ssm.modules.block import Block
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba3 import Mamba3
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.utils.generation import GenerationMixin, InferenceParams

__all__ = ["export"]

_NAME = "onnx.export"
_OLDEST = (2, 7)  # whose exporter translates operators by a table


def export(
    model: nn.Module,
    file: str | os.PathLike[str] | None = None,
    args: tuple[typing.Any, ...] | None = None,
    *,
    states: bool = False,
    runtime_operators: bool = False,
    **options: typing.Any,
) -> typing.Any:
    """torch.onnx.export of a model on this package's operators, for any batch and any length of 1 or more.

    A scan becomes a loop over chunks of the length in ONNX's standard operators (opset 18), computed in float32.

    Args:
        model: a language model (MambaLMHeadModel), a Mamba or a Mamba2 block; or with args any module.
        file: path to write to, or None.
        args: the example inputs of another module, whose dynamic sizes options names as dynamic_shapes.
        states: without args: the states are inputs and outputs, so that one file takes a prompt, pieces of it, and
            steps of one token.
        runtime_operators: scans and convolutions are onnxruntime's LinearAttention and CausalConvWithState (domain
            com.microsoft, onnxruntime 1.25 or newer), whose steps of one token are faster. No other runtime takes them.
        options: more arguments of torch.onnx.export (opset_version, custom_translation_table, external_data, ...).

    Inputs: input_ids (B, L) int64 of a language model, hidden_states (B, L, d_model) of a block. With states also, for
    each layer i, conv_state_i (B, channels, d_conv) and ssm_state_i, as of allocate_inference_cache: zeros before the
    first token. Outputs: logits (B, L, vocabulary) or out (B, L, d_model); then new_conv_state_i and new_ssm_state_i.

    Returns:
        torch's ONNXProgram.

    Raises:
        ImportError: onnx or onnxscript is missing. RuntimeError: this torch is older than 2.7.
        ValueError, TypeError: the model or a part of it cannot be exported; the message names it.
    """
    _check_environment()
    _check_model(model)
    from mamba_ssm.utils import _onnx_scans

    exported = model
    if args is None:
        exported, args, named = _with_example(model, states)
        options = {**named, **options}
    elif states:
        raise ValueError(f"{_NAME}: states=True makes the inputs itself, got args too: leave one of them out")
    mine = {
        torch.ops.mamba_ssm.selective_scan.default: _onnx_scans.selective_scan(runtime_operators),
        torch.ops.mamba_ssm.ssd.default: _onnx_scans.ssd(runtime_operators),
        torch.ops.mamba_ssm.causal_conv1d.default: _onnx_scans.causal_conv1d(runtime_operators),
    }
    options["custom_translation_table"] = {**mine, **(options.get("custom_translation_table") or {})}
    modes = [(module, module.training) for module in model.modules()]
    try:
        with reference.for_exporter(), torch.no_grad():
            return torch.onnx.export(exported.eval(), args, file, dynamo=True, **options)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _onnx_scans.CannotExport):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
    finally:
        for module, training in modes:
            module.training = training


def _check_environment() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _OLDEST:
        raise RuntimeError(
            f"{_NAME}: needs torch {'.'.join(map(str, _OLDEST))} or newer, whose exporter translates operators by a "
            f"table, got {torch.__version__}"
        )
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{_NAME}: needs {' and '.join(missing)}: pip install 'mamba_ssm[onnx]'")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_NAME}: model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, Mamba3):
            raise ValueError(
                f"{_NAME}: {where}, which has no ONNX form by chunks; for one fixed length torch.onnx.export within "
                "mamba_ssm.utils.reference.plain_torch() writes it step by step"
            )
        for group in ("context_parallel_group", "process_group"):
            if getattr(module, group, None) is not None:
                raise ValueError(f"{_NAME}: {where} with a {group}: export the layer as one process has it")


def _with_example(model: nn.Module, states: bool) -> tuple[nn.Module, tuple[typing.Any, ...], dict[str, typing.Any]]:
    """(module, args, options of torch.onnx.export) of a language model or a block."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    if isinstance(model, GenerationMixin):
        device = next(model.parameters()).device
        x, name, out = torch.zeros(2, 9, dtype=torch.int64, device=device), "input_ids", "logits"
    elif isinstance(model, (Mamba, Mamba2)):
        weight = model.in_proj.weight
        x = torch.zeros(2, 9, model.d_model, dtype=weight.dtype, device=weight.device)
        name, out = "hidden_states", "out"
    else:
        raise TypeError(
            f"{_NAME}: without args model must be a MambaLMHeadModel, Mamba or Mamba2, got {type(model).__name__}: "
            "give args and dynamic_shapes"
        )
    names: dict[str, typing.Any] = {"input_names": [name], "output_names": [out]}
    if not states:
        return _Outputs(model), (x,), {**names, "dynamic_shapes": ({0: batch, 1: length},)}
    layers = dict(_stateful_layers(model))
    example = [state for layer in layers.values() for state in layer.allocate_inference_cache(2, 0)]
    of_states = [f"{kind}_state_{i}" for i in layers for kind in ("conv", "ssm")]
    names = {
        "input_names": [name, *of_states],
        "output_names": [out, *(f"new_{state}" for state in of_states)],
        "dynamic_shapes": ({0: batch, 1: length}, tuple({0: batch} for _ in example)),
    }
    return _WithStates(model, list(layers)), (x, *example), names


def _stateful_layers(model: nn.Module) -> Iterator[tuple[int, Mamba | Mamba2]]:
    """(layer_idx, mixer) of each layer that has states."""
    if isinstance(model, (Mamba, Mamba2)):
        blocks: list[tuple[int | None, typing.Any]] = [(model.layer_idx, model)]
    else:
        found = [module for module in model.modules() if isinstance(module, Block)]
        blocks = [(block.layer_idx, block.mixer) for block in found]
    for index, mixer in blocks:
        if not isinstance(mixer, (Mamba, Mamba2)) or index is None:
            raise ValueError(
                f"{_NAME}: with states=True every layer must be a Mamba or Mamba2 block with a layer_idx, got "
                f"{type(mixer).__name__} with layer_idx={index}"
            )
        yield index, mixer


class _Outputs(nn.Module):
    """A model whose output is one tensor: logits of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        return out if isinstance(out, torch.Tensor) else out.logits


class _WithStates(_Outputs):
    """The same, whose states are arguments and results. It always goes on from them: zeros are a beginning."""

    def __init__(self, model: nn.Module, layers: list[int]) -> None:
        super().__init__(model)
        self.layers = layers

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        states = tuple(state.clone() for state in states)  # which the layers write
        params = InferenceParams(max_seqlen=0, max_batch_size=0, seqlen_offset=1)
        params.key_value_memory_dict = {i: states[2 * n : 2 * n + 2] for n, i in enumerate(self.layers)}
        out = self.model(x, inference_params=params)
        return (out if isinstance(out, torch.Tensor) else out.logits, *states)
