"""Whether the weights of a checkpoint are those of a configuration, told before the model is made."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn as nn

from mamba_ssm._arguments import PARAMETER_DTYPES, first_few, shown
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.quantized import of_weight
from mamba_ssm.utils.hf import CheckpointError

EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"
_LAYER = re.compile(r"backbone\.layers\.(\d+)\..+", re.DOTALL)

Shapes = dict[str, tuple[int, ...]]


def shapes_of(state: Mapping[str, torch.Tensor]) -> Shapes:
    """{name: shape} of a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_dtypes(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copying into the parameters would drop an imaginary part, or take a quantised weight's integers for its values.

    Raises:
        CheckpointError: a tensor is not of a parameter's dtype.
    """
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    wrong = [f"{name} {str(dtype)[6:]}" for name, dtype in dtypes.items() if dtype not in PARAMETER_DTYPES]
    if wrong:
        raise CheckpointError(
            f"{path}: weights must be float32, float16, bfloat16 or float64, got {first_few(wrong)}; others are not "
            "converted, since that would change them"
        )


def check_sizes(config: MambaConfig, state: Mapping[str, torch.Tensor], path: Path) -> None:
    """What is cheap to tell: the number of layers, the vocabulary and the width.

    Raises:
        CheckpointError: config.json has another.
    """
    layers = {found[1] for found in map(_LAYER.fullmatch, state) if found}
    if not layers and config.n_layer:
        raise CheckpointError(
            f"{path} does not fit its config.json: n_layer is {config.n_layer} there, but the weights have no "
            f"backbone.layers.0, ...; they are {first_few(list(state)) or 'none'}"
        )
    if len(layers) != config.n_layer:
        raise CheckpointError(
            f"{path} does not fit its config.json: n_layer is {config.n_layer} there, but the weights have "
            f"{len(layers)} layers (backbone.layers.0, ...)"
        )
    expected = _embedding_shape(config)
    if EMBEDDING in state and state[EMBEDDING].shape != expected:
        raise CheckpointError(
            f"{path} does not fit its config.json: vocab_size {config.vocab_size}, pad_vocab_size_multiple "
            f"{config.pad_vocab_size_multiple} and d_model {config.d_model} there need {EMBEDDING} {expected}, "
            f"got {shown(tuple(state[EMBEDDING].shape))}"
        )


def expected_shapes(config: MambaConfig, make_layer: Callable[[int], nn.Module]) -> Shapes:
    """The names and shapes of the state dict of a MambaLMHeadModel of config.

    make_layer: gives the layer of an index, on the meta device. It is called once for each kind of layer.
    """
    attention = frozenset(config.attn_layer_idx or ())
    kinds: dict[bool, Shapes] = {}
    shapes: Shapes = {EMBEDDING: _embedding_shape(config), HEAD: _embedding_shape(config)}
    shapes.update({f"backbone.norm_f.{name}": (config.d_model,) for name in ("weight", "bias")[: 2 - config.rms_norm]})
    for i in range(config.n_layer):
        kind = i in attention
        if kind not in kinds:
            kinds[kind] = shapes_of(make_layer(i).state_dict())
        shapes.update({f"backbone.layers.{i}.{name}": shape for name, shape in kinds[kind].items()})
    return shapes


def check_shapes(expected: Shapes, found: Shapes, path: Path) -> None:
    """The names and shapes of path's tensors, found, are those expected.

    Raises:
        CheckpointError: names the first few tensors that are missing, unexpected or of another shape.
    """
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} {found[name]} instead of {shape}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        text = "; ".join(f"{kind}: {first_few(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(f"{path} does not fit its config.json: {text}")


def check_tied(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """The head's weight is the embedding's, where state has both.

    Raises:
        CheckpointError: they differ.
    """
    for one, other in zip(of_weight(HEAD), of_weight(EMBEDDING), strict=True):
        head, embedding = state.get(one), state.get(other)
        if EMBEDDING not in state or HEAD not in state or head is embedding:
            continue  # a subclass may have others
        if head is None or embedding is None or head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise CheckpointError(f"{path}: {one} differs from {other}, but config.json has tie_embeddings: true")


def _embedding_shape(config: MambaConfig) -> tuple[int, int]:
    multiple = config.pad_vocab_size_multiple
    return -(-config.vocab_size // multiple) * multiple, config.d_model
