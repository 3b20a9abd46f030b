"""The configuration of a Mamba language model, as upstream's config.json holds it."""

import numbers
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from mamba_ssm._arguments import check_flags, check_integer, first_few, shown
from mamba_ssm.utils.hf import CheckpointError


@dataclass
class MambaConfig:
    """What config.json of a checkpoint says; the names and defaults are upstream's.

    Args:
        d_model: width. n_layer: number of blocks.
        d_intermediate: hidden width of the gated MLP that follows each mixer; 0: none.
        vocab_size: number of tokens, before it is padded to a multiple of pad_vocab_size_multiple.
        ssm_cfg: {"layer": "Mamba1", "Mamba2" or "Mamba3"} and arguments of that module; Mamba1 if there is no "layer".
        attn_layer_idx: the blocks whose mixer is attention. attn_cfg: arguments of MHA.
        rms_norm: RMSNorm instead of LayerNorm. residual_in_fp32: the residual stream is float32.
        fused_add_norm: add and norm in one kernel. tie_embeddings: lm_head shares the embedding's weight.
    """

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict = field(default_factory=dict)
    attn_layer_idx: list = field(default_factory=list)
    attn_cfg: dict = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True

    @classmethod
    def from_dict(cls, values: dict[str, typing.Any], source: str = "config.json") -> "MambaConfig":
        """A configuration from the contents of config.json; source names it in errors.

        Raises:
            CheckpointError (a ValueError): a key is not one of MambaConfig's, as in a checkpoint of another library, or
                a value cannot be meant.
        """
        unknown = sorted(values.keys() - {known.name for known in fields(cls)})
        if unknown:
            cure = ""
            if "model_type" in unknown:
                cure = f"; a transformers checkpoint ({shown(values['model_type'])}) is loaded with transformers"
            raise CheckpointError(f"{source} is no mamba_ssm configuration: unknown {first_few(unknown)}{cure}")
        config = cls(**values)
        try:
            check_config(config, source)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        return config


def check_config(config: typing.Any, source: str = "MambaConfig") -> MambaConfig:
    """What config says of MambaConfig's fields; it may be any object with such attributes, and one that it lacks has
    its default. The arguments in ssm_cfg and attn_cfg are for their modules to check.

    Raises:
        ValueError: a value cannot be meant. source: where it was written.
    """
    checked = MambaConfig()
    for known in fields(MambaConfig):
        value = getattr(config, known.name, getattr(checked, known.name))
        if known.type is int:
            check_integer(source, known.name, value, least=0 if known.name == "d_intermediate" else 1)
        elif known.type is bool:
            check_flags(source, **{known.name: value})
        elif known.type is dict:
            if not (value is None or isinstance(value, Mapping)):
                raise ValueError(
                    f'{source}: {known.name} must hold arguments by name, such as {{"d_conv": 4}}, got {shown(value)}'
                )
            value = dict(value or {})
        setattr(checked, known.name, value)
    check_layers(source, checked.attn_layer_idx, checked.n_layer)
    return checked


def check_layers(source: str, attn_layer_idx: Collection[int] | None, n_layer: int) -> None:
    """attn_layer_idx, a list or None, names layers that there are."""
    if attn_layer_idx is None:
        return
    listed = isinstance(attn_layer_idx, Collection) and not isinstance(attn_layer_idx, (str, Mapping))
    types = set(map(type, attn_layer_idx)) if listed else set()  # a list may be long
    integers = all(issubclass(kind, numbers.Integral) and kind is not bool for kind in types)
    if not (listed and integers and all(0 <= layer < n_layer for layer in attn_layer_idx)):
        raise ValueError(
            f"{source}: attn_layer_idx must be a list of layers from 0 to n_layer - 1 = {n_layer - 1}, "
            f"got {shown(attn_layer_idx)}"
        )
