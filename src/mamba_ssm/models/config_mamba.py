"""The configuration of a Mamba language model, as upstream's config.json holds it."""

from dataclasses import dataclass, field, fields


@dataclass
class MambaConfig:
    """What config.json of a checkpoint says; the names and defaults are upstream's.

    Args:
        d_model: width. n_layer: number of blocks.
        d_intermediate: hidden width of the gated MLP that follows each mixer; 0: none.
        vocab_size: number of tokens, before it is padded to a multiple of pad_vocab_size_multiple.
        ssm_cfg: {"layer": "Mamba1" or "Mamba2"} and arguments of that module; Mamba1 if there is no "layer".
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
    def from_dict(cls, values, source="config.json"):
        """A configuration from the contents of config.json; source names it in errors.

        Raises:
            ValueError: a key is not one of MambaConfig's, as in a checkpoint of another library, or a size is no
                integer.
        """
        unknown = sorted(values.keys() - {known.name for known in fields(cls)})
        if unknown:
            cure = ""
            if "model_type" in unknown:
                cure = f"; a transformers checkpoint ({values['model_type']!r}) is loaded with transformers"
            raise ValueError(f"{source} is no mamba_ssm configuration: unknown {', '.join(unknown)}{cure}")
        for known in fields(cls):
            if known.type is int and type(values.get(known.name, 0)) is not int:
                raise ValueError(f"{source}: {known.name} must be an integer, got {values[known.name]!r}")
        return cls(**values)
