"""Language models of every kind, small enough to decode at once, and prompts for them."""

import torch

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

ATTENTION = {
    "attn_layer_idx": [1],
    "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4, "d_conv": 4},
}
MODELS = {
    "mamba": {},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "chunk_size": 16}},
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 8}},
    "mimo": {"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 8, "is_mimo": True, "is_outproj_norm": True}},
    "hybrid": {"ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "chunk_size": 16}, **ATTENTION},
    "hybrid of mamba3": {"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 8}, **ATTENTION},
}


def make(kind="mamba", device="cpu", dtype=None):
    torch.manual_seed(0)
    config = MambaConfig(d_model=32, n_layer=3, vocab_size=59, **MODELS[kind])
    # larger than a trained model's: the likeliest token must lead by more than rounding
    return MambaLMHeadModel(config, initializer_cfg={"initializer_range": 0.5}, device=device, dtype=dtype)


def prompt(batch=2, seqlen=6, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 59, (batch, seqlen), generator=generator).to(device)
