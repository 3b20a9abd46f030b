"""Checkpoints of upstream load: the names and shapes of each kind of model, written down by hand from its layout."""

import pytest
import torch
from torch import nn

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel, MixerModel, create_block
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba3 import Mamba3
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.modules.mha import MHA

MAMBA1 = {  # d_model 24: d_inner 48, d_state 16, dt_rank ceil(24 / 16) = 2
    "A_log": (48, 16),
    "D": (48,),
    "in_proj.weight": (96, 24),
    "conv1d.weight": (48, 1, 4),
    "conv1d.bias": (48,),
    "x_proj.weight": (34, 48),
    "dt_proj.weight": (48, 2),
    "dt_proj.bias": (48,),
    "out_proj.weight": (24, 48),
}
MAMBA2 = {  # d_inner 48, headdim 8: 6 heads, d_state 16, one group
    "dt_bias": (6,),
    "A_log": (6,),
    "D": (6,),
    "in_proj.weight": (48 + 48 + 2 * 16 + 6, 24),
    "conv1d.weight": (80, 1, 4),
    "conv1d.bias": (80,),
    "norm.weight": (48,),
    "out_proj.weight": (24, 48),
}
ATTENTION = {  # 2 heads of 12
    "in_proj.weight": (72, 24),
    "conv1d.weight": (72, 1, 4),
    "conv1d.bias": (72,),
    "out_proj.weight": (24, 24),
}
MLP = {"fc1.weight": (256, 24), "fc2.weight": (24, 128)}
ATTENTION_CFG = {
    "causal": True,
    "d_conv": 4,
    "num_heads": 2,
    "qkv_proj_bias": False,
    "out_proj_bias": False,
    "rotary_emb_dim": 6,
}
MAMBA2_CFG = {"layer": "Mamba2", "headdim": 8, "d_state": 16}


def expected_shapes(mixers, mlp=False, norm_bias=False):
    """Names and shapes of a model with a vocabulary of 40."""
    shapes = {"backbone.embedding.weight": (40, 24), "lm_head.weight": (40, 24), "backbone.norm_f.weight": (24,)}
    for i, mixer in enumerate(mixers):
        layer = f"backbone.layers.{i}"
        shapes[f"{layer}.norm.weight"] = (24,)
        shapes.update({f"{layer}.mixer.{name}": shape for name, shape in mixer.items()})
        if mlp:
            shapes[f"{layer}.norm2.weight"] = (24,)
            shapes.update({f"{layer}.mlp.{name}": shape for name, shape in MLP.items()})
    if norm_bias:
        names = [name for name in shapes if name.split(".")[-2] in ("norm", "norm2", "norm_f")]
        shapes.update({name.replace("weight", "bias"): (24,) for name in names})
    return shapes


CASES = {
    "mamba1": ({"n_layer": 2}, expected_shapes([MAMBA1] * 2)),
    "mamba1 layer norm": ({"n_layer": 1, "rms_norm": False}, expected_shapes([MAMBA1], norm_bias=True)),
    "mamba2": ({"n_layer": 2, "ssm_cfg": MAMBA2_CFG}, expected_shapes([MAMBA2] * 2)),
    "hybrid with an MLP": (
        {"n_layer": 3, "ssm_cfg": MAMBA2_CFG, "attn_layer_idx": [1], "attn_cfg": ATTENTION_CFG, "d_intermediate": 100},
        expected_shapes([MAMBA2, ATTENTION, MAMBA2], mlp=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_upstreams_checkpoints_load_strictly(case):
    options, shapes = CASES[case]
    model = MambaLMHeadModel(MambaConfig(d_model=24, vocab_size=37, **options))  # padded to 40
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == shapes
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    checkpoint["lm_head.weight"] = checkpoint["backbone.embedding.weight"]
    model.load_state_dict(checkpoint, strict=True)
    assert model.lm_head.weight is model.backbone.embedding.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, checkpoint[name])


def test_untied_head():
    model = MambaLMHeadModel(
        MambaConfig(d_model=24, n_layer=1, vocab_size=37, tie_embeddings=False, pad_vocab_size_multiple=1)
    )
    assert model.lm_head.weight is not model.backbone.embedding.weight
    assert model.lm_head.weight.shape == model.backbone.embedding.weight.shape == (37, 24)


def test_layers_by_name():
    assert isinstance(create_block(24, 0).mixer, Mamba)
    assert isinstance(create_block(24, 0, {"layer": "Mamba1", "d_state": 4}).mixer, Mamba)
    assert isinstance(create_block(24, 0, MAMBA2_CFG).mixer, Mamba2)
    assert isinstance(create_block(24, 0, MAMBA2_CFG, [3], {"num_heads": 2}, layer_idx=3).mixer, MHA)
    assert isinstance(create_block(24, 0, {"layer": "Mamba3", "headdim": 8}).mixer, Mamba3)
    with pytest.raises(ValueError, match="must be one of 'Mamba1', 'Mamba2', 'Mamba3', 'BiMamba2', 'Hydra', got 'S4'"):
        create_block(24, 0, {"layer": "S4"})
    with pytest.raises(
        ValueError, match=r"attn_layer_idx must be a list of layers from 0 to n_layer - 1 = 1, got \[0, 2\]"
    ):
        MambaLMHeadModel(MambaConfig(d_model=24, n_layer=2, attn_layer_idx=[0, 2], attn_cfg={"num_heads": 2}))
    config = {"layer": "Mamba2", "headdim": 8}
    create_block(24, 0, config)
    assert config == {"layer": "Mamba2", "headdim": 8}, "the caller's dict was changed"


def test_initialisation():
    model = MixerModel(64, 8, 256, 1000, rms_norm=True, initializer_cfg={"initializer_range": 0.5})
    assert abs(model.embedding.weight.std().item() - 0.5) < 0.01
    mixer, mlp = model.layers[3].mixer, model.layers[3].mlp
    # kaiming-uniform with a = sqrt(5) is uniform within 1/sqrt(fan_in); 2 residuals in each of 8 layers
    for linear in (mixer.out_proj, mlp.fc2):
        bound = 1 / (linear.in_features**0.5 * 16**0.5)
        assert 0.95 * bound < linear.weight.abs().max().item() <= bound
    assert mlp.fc1.weight.abs().max() > 0.9 / 64**0.5
    dt = nn.functional.softplus(mixer.dt_proj.bias)
    assert dt.min() > 0.0005, "the bias of dt_proj was set to zero"
    plain = MambaLMHeadModel(MambaConfig(d_model=24, n_layer=1, vocab_size=1000))
    assert abs(plain.backbone.embedding.weight.std().item() - 0.02) < 0.001
    narrow = MambaLMHeadModel(MambaConfig(d_model=24, n_layer=1, vocab_size=100), dtype=torch.bfloat16)
    assert narrow.lm_head.weight.dtype == torch.bfloat16
    assert narrow.backbone.layers[0].mixer.A_log.dtype == torch.float32


def test_the_same_seed_gives_upstreams_weights():
    """The random numbers of each parameter, drawn by hand in the order in which upstream makes its layers."""

    def linear(rows, columns):
        return nn.Linear(columns, rows, bias=False).weight.detach()

    def scaled(weight):
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        weight /= 2**0.5  # layers

    torch.manual_seed(3)
    expected = {"embedding.weight": torch.randn(104, 24)}
    for i in range(2):
        expected[f"layers.{i}.mixer.in_proj.weight"] = linear(96, 24)
        conv1d = nn.Conv1d(48, 48, 4, groups=48)
        expected[f"layers.{i}.mixer.conv1d.weight"] = conv1d.weight.detach()
        expected[f"layers.{i}.mixer.conv1d.bias"] = conv1d.bias.detach()
        expected[f"layers.{i}.mixer.x_proj.weight"] = linear(34, 48)
        dt_proj = nn.Linear(2, 48)
        expected[f"layers.{i}.mixer.dt_proj.weight"] = dt_proj.weight.detach().uniform_(-(2**-0.5), 2**-0.5)
        dt = torch.exp(torch.rand(48) * torch.tensor(100.0).log() + torch.tensor(0.001).log())
        expected[f"layers.{i}.mixer.dt_proj.bias"] = dt + torch.log(-torch.expm1(-dt))
        expected[f"layers.{i}.mixer.out_proj.weight"] = linear(24, 48)
    head = None
    for _ in range(2):  # the backbone's initialisation, then the whole model's
        expected["embedding.weight"].normal_(std=0.02)
        for i in range(2):
            scaled(expected[f"layers.{i}.mixer.out_proj.weight"])
        head = linear(104, 24) if head is None else head
    after = torch.rand(1)

    torch.manual_seed(3)
    model = MambaLMHeadModel(MambaConfig(d_model=24, n_layer=2, vocab_size=100, tie_embeddings=False))
    found = model.state_dict()
    for name, values in expected.items():
        torch.testing.assert_close(found[f"backbone.{name}"], values, rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(found["lm_head.weight"], head)
    assert torch.rand(1) == after
