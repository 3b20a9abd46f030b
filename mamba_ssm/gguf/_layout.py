"""What llama.cpp's architectures mamba and mamba2 are in our names: sizes, tensors, and options that they have not."""

import typing

import torch.nn as nn

from mamba_ssm.models.config_mamba import MambaConfig, check_config
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba_simple import Mamba

EPSILON = 1e-5  # of all norms in MambaLMHeadModel
EXPAND = 2  # llama.cpp takes no other
LAYERS = {"mamba": "Mamba1", "mamba2": "Mamba2"}


class Sizes(typing.NamedTuple):
    """What the metadata of a file says."""

    architecture: str  # mamba or mamba2
    d_model: int
    n_layer: int
    rows: int  # of the embedding
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int  # of mamba2: heads
    ngroups: int  # of mamba2


class Entry(typing.NamedTuple):
    """A tensor. matrix: of the file's type; the others are float32."""

    ours: str
    theirs: str
    shape: tuple[int, ...]  # in the file
    matrix: bool = False
    is_A: bool = False  # -exp(A_log) in the file
    own: tuple[int, ...] = ()  # the parameter's shape, where it is another


def entries(sizes: Sizes, tied: bool) -> list[Entry]:
    """All tensors of a model."""
    embedding = sizes.rows, sizes.d_model
    found = [Entry("backbone.embedding.weight", "token_embd.weight", embedding, matrix=True)]
    found.append(Entry("backbone.norm_f.weight", "output_norm.weight", (sizes.d_model,)))
    if not tied:
        found.append(Entry("lm_head.weight", "output.weight", embedding, matrix=True))
    of_layer = _of_mamba(sizes) if sizes.architecture == "mamba" else _of_mamba2(sizes)
    for i in range(sizes.n_layer):
        ours, theirs = f"backbone.layers.{i}.", f"blk.{i}."
        found += [one._replace(ours=ours + one.ours, theirs=theirs + one.theirs) for one in of_layer]
    return found


def _of_mamba(sizes: Sizes) -> list[Entry]:
    d_model, d_inner, d_state, rank = sizes.d_model, sizes.d_inner, sizes.d_state, sizes.dt_rank
    return [
        *_of_both(sizes, 2 * d_inner, d_inner),
        Entry("mixer.x_proj.weight", "ssm_x.weight", (rank + 2 * d_state, d_inner), matrix=True),
        Entry("mixer.dt_proj.weight", "ssm_dt.weight", (d_inner, rank)),
        Entry("mixer.dt_proj.bias", "ssm_dt.bias", (d_inner,)),
        Entry("mixer.A_log", "ssm_a", (d_inner, d_state), is_A=True),
        Entry("mixer.D", "ssm_d", (d_inner,)),
        Entry("mixer.out_proj.weight", "ssm_out.weight", (d_model, d_inner), matrix=True),
    ]


def _of_mamba2(sizes: Sizes) -> list[Entry]:
    d_model, d_inner, heads, groups = sizes.d_model, sizes.d_inner, sizes.dt_rank, sizes.ngroups
    channels = d_inner + 2 * groups * sizes.d_state
    return [
        *_of_both(sizes, d_inner + channels + heads, channels),
        Entry("mixer.dt_bias", "ssm_dt.bias", (heads,)),
        Entry("mixer.A_log", "ssm_a", (heads, 1), is_A=True, own=(heads,)),
        Entry("mixer.D", "ssm_d", (heads, 1), own=(heads,)),
        Entry("mixer.norm.weight", "ssm_norm.weight", (groups, d_inner // groups), own=(d_inner,)),
        Entry("mixer.out_proj.weight", "ssm_out.weight", (d_model, d_inner), matrix=True),
    ]


def _of_both(sizes: Sizes, projected: int, channels: int) -> list[Entry]:
    return [
        Entry("norm.weight", "attn_norm.weight", (sizes.d_model,)),
        Entry("mixer.in_proj.weight", "ssm_in.weight", (projected, sizes.d_model), matrix=True),
        Entry("mixer.conv1d.weight", "ssm_conv1d.weight", (channels, sizes.d_conv), own=(channels, 1, sizes.d_conv)),
        Entry("mixer.conv1d.bias", "ssm_conv1d.bias", (channels,)),
    ]


def sizes_of(model: nn.Module) -> Sizes:
    """Of a model that llama.cpp can express.

    Raises:
        TypeError: it is no MambaLMHeadModel. ValueError: it has what llama.cpp has not; the message says what.
    """
    if not isinstance(model, MambaLMHeadModel):
        raise TypeError(f"GGUF export: model must be a MambaLMHeadModel, got {type(model).__name__}")
    config = check_config(model.config)
    _require(config.d_intermediate == 0, f"an MLP behind each mixer (d_intermediate={config.d_intermediate})")
    _require(not config.attn_layer_idx, f"attention layers (attn_layer_idx={config.attn_layer_idx})")
    _require(config.rms_norm, "LayerNorm (rms_norm=False)")
    mixers = [layer.mixer for layer in typing.cast(typing.Any, model.backbone.layers)]
    first = mixers[0]
    for mixer in mixers:
        _require(type(mixer) is type(first), "layers of several kinds")
        _check_mixer(mixer)
    two = isinstance(first, Mamba2)
    return Sizes(
        "mamba2" if two else "mamba",
        config.d_model,
        config.n_layer,
        model.vocab_size,
        first.d_inner,
        first.d_state,
        first.d_conv,
        first.nheads if two else first.dt_rank,
        first.ngroups if two else 1,
    )


def _check_mixer(mixer: typing.Any) -> None:
    name = type(mixer).__name__
    _require(isinstance(mixer, (Mamba, Mamba2)), f"layers of {name}")
    _require(mixer.d_inner == EXPAND * mixer.d_model, f"expand={mixer.expand} (it has {EXPAND} alone)")
    _require(mixer.in_proj.bias is None and mixer.out_proj.bias is None, "biases of in_proj and out_proj (bias=True)")
    _require(mixer.conv1d.bias is not None, "a convolution without bias (conv_bias=False)")
    if isinstance(mixer, Mamba):
        _require(mixer.bimamba_type == "none", f"bimamba_type={mixer.bimamba_type!r}")
        _require(not mixer.layer_scale, "gamma (init_layer_scale)")
        return
    _require(mixer.process_group is None, "tensor parallel layers (process_group)")
    _require(mixer.d_ssm == mixer.d_inner, f"an MLP inside the mixer (d_ssm={mixer.d_ssm})")
    _require(mixer.rmsnorm and not mixer.norm_before_gate, "rmsnorm=False or norm_before_gate=True")
    _require(not mixer.D_has_hdim, "D_has_hdim=True")
    _require(mixer.activation == "silu", f"activation={mixer.activation!r}")
    limits = tuple(mixer.dt_limit)
    _require(limits == (0.0, float("inf")), f"dt_limit={limits}")


def _require(expressible: bool, what: str) -> None:
    if not expressible:
        raise ValueError(f"GGUF export: llama.cpp's mamba and mamba2 have no {what}")


def config_of(sizes: Sizes, tied: bool, vocabulary: tuple[int, int]) -> MambaConfig:
    """vocabulary: vocab_size and pad_vocab_size_multiple."""
    options: dict[str, typing.Any] = {"layer": LAYERS[sizes.architecture], "d_state": sizes.d_state}
    options |= {"d_conv": sizes.d_conv, "expand": EXPAND}
    if sizes.architecture == "mamba":
        options["dt_rank"] = sizes.dt_rank
    else:
        options |= {"headdim": sizes.d_inner // sizes.dt_rank, "ngroups": sizes.ngroups}
    return MambaConfig(
        d_model=sizes.d_model,
        n_layer=sizes.n_layer,
        vocab_size=vocabulary[0],
        pad_vocab_size_multiple=vocabulary[1],
        ssm_cfg=options,
        tie_embeddings=tied,
    )
