"""One layer of a language model, as the configuration names it."""

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
import torch.nn as nn

from mamba_ssm._arguments import shown
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.bimamba2 import BiMamba2
from mamba_ssm.modules.block import Block
from mamba_ssm.modules.hydra import Hydra
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba3 import Mamba3
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.modules.mha import MHA
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.ops.norm import RMSNorm

_MIXERS = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3, "BiMamba2": BiMamba2, "Hydra": Hydra}


def create_block(
    d_model: int,
    d_intermediate: int,
    ssm_cfg: Mapping[str, typing.Any] | None = None,
    attn_layer_idx: Collection[int] | None = None,
    attn_cfg: Mapping[str, typing.Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """One Block: the mixer that ssm_cfg names, or attention where layer_idx is in attn_layer_idx, and a gated MLP of
    width d_intermediate unless that is 0. The arguments are MambaConfig's.

    Raises:
        ValueError: ssm_cfg["layer"] is none of "Mamba1", "Mamba2", "Mamba3", "BiMamba2" and "Hydra", or ssm_cfg or
            attn_cfg has another name than its module's arguments (of which Mamba3 takes any and warns), or lacks one.
    """
    factory: dict[str, typing.Any] = {"device": device, "dtype": dtype}
    if layer_idx in (attn_layer_idx or ()):
        mixer_cls = _mixer(MHA, "attn_cfg", attn_cfg or {}, layer_idx=layer_idx, **factory)
    else:
        options = dict(ssm_cfg or {})
        layer = options.pop("layer", "Mamba1")
        if layer not in list(_MIXERS):  # not hashed: it may be anything
            raise ValueError(f"ssm_cfg['layer'] must be one of {', '.join(map(repr, _MIXERS))}, got {shown(layer)}")
        mixer_cls = _mixer(_MIXERS[layer], "ssm_cfg", options, layer_idx=layer_idx, **factory)
    mlp_cls = nn.Identity if d_intermediate == 0 else partial(GatedMLP, hidden_features=d_intermediate, **factory)
    block = Block(
        d_model,
        mixer_cls,
        mlp_cls,
        norm_cls=partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **factory),
        fused_add_norm=fused_add_norm,
        residual_in_fp32=residual_in_fp32,
    )
    block.layer_idx = layer_idx
    return block


def _mixer(
    cls: type[nn.Module], source: str, options: Mapping[str, typing.Any], **given: typing.Any
) -> Callable[[int], nn.Module]:
    """cls with all arguments but the width, the first; options are those that source holds."""
    width, *arguments = inspect.signature(cls).parameters.values()
    names = [argument.name for argument in arguments if argument.name not in given]
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    unknown = [name for name in options if name in (width.name, *given) or not (takes_any or name in names)]
    if unknown:
        raise ValueError(f"{source}: {shown(unknown[0])} is none of {cls.__name__}'s arguments, {', '.join(names)}")
    for argument in arguments:
        needed = argument.default is argument.empty and argument.kind is not argument.VAR_KEYWORD
        if needed and argument.name not in options:
            raise ValueError(f"{source}: {cls.__name__} needs {argument.name!r}, got {shown(options)}")
    return partial(cls, **options, **given)


def layer_without_memory(config: MambaConfig, layer_idx: int) -> Block:
    """A layer with the names and shapes of MixerModel's."""
    options = config.ssm_cfg, config.attn_layer_idx, config.attn_cfg
    return create_block(
        config.d_model,
        config.d_intermediate,
        *options,
        rms_norm=config.rms_norm,
        layer_idx=layer_idx,
        device="meta",
    )
