"""Weights are compared with their configuration before the model is made, at the cost of one layer of each kind."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from mamba_ssm import CheckpointError, MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.block import Block

CONFIG = {"d_model": 16, "n_layer": 2, "vocab_size": 21}
HEADS = {"headdim": 8, "d_state": 8}


def save(folder, **options):
    model = MambaLMHeadModel(MambaConfig(**{**CONFIG, **options}))
    model.save_pretrained(folder)
    return model


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


@pytest.fixture
def made(monkeypatch):
    """The layers that are made, each as it is."""
    blocks, init = [], Block.__init__

    def count(self, *args, **kwargs):
        blocks.append(self)
        assert len(blocks) <= 8, "layers are made before the weights were compared"
        init(self, *args, **kwargs)

    monkeypatch.setattr(Block, "__init__", count)
    return blocks


def error_of(folder, limit=1000):
    with pytest.raises(CheckpointError) as error:
        MambaLMHeadModel.from_pretrained(folder)
    assert isinstance(error.value, ValueError) and len(str(error.value)) < limit
    return str(error.value)


def test_ten_million_layers(tmp_path, made):
    save(tmp_path)
    made.clear()
    for more in ({}, {"attn_layer_idx": [3, 9_999_999], "attn_cfg": {"num_heads": 2}}):
        write_config(tmp_path, n_layer=10_000_000, **more)
        text = error_of(tmp_path, 400)
        assert "pytorch_model.bin does not fit its config.json: n_layer is 10000000 there" in text
        assert "the weights have 2 layers" in text
    assert not made


def test_thousands_of_layers_that_hold_little(tmp_path, made):
    model = save(tmp_path)
    made.clear()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers" not in name}
    state.update({f"backbone.layers.{i}.x": torch.ones(1) for i in range(3000)})
    torch.save(state, tmp_path / "pytorch_model.bin")
    write_config(tmp_path, n_layer=3000, attn_layer_idx=list(range(0, 3000, 2)), attn_cfg={"num_heads": 2})
    text = error_of(tmp_path)
    assert "missing: backbone.layers.0.norm.weight, " in text and " and 22495 more" in text
    assert "unexpected: backbone.layers.0.x, backbone.layers.1.x, " in text and " and 2995 more" in text
    assert len(made) == 2, "one of each kind"
    assert all(parameter.is_meta for block in made for parameter in block.parameters())


LARGE = [
    {"d_model": 2**31 - 1},
    {"vocab_size": 2**31 - 1},
    {"pad_vocab_size_multiple": 2**31 - 1},
    {"d_intermediate": 2**31 - 1},
    {"ssm_cfg": {"expand": 1e8}},
    {"ssm_cfg": {"dt_rank": 2**31 - 1}},
    {"ssm_cfg": {"layer": "Mamba2", "expand": 1e8}},
    {"ssm_cfg": {"layer": "Mamba3", "expand": 1e8}},
    {"attn_layer_idx": [0], "attn_cfg": {"num_heads": 2**20, "head_dim": 2**10}},
    {"attn_layer_idx": [0], "attn_cfg": {"num_heads": 2**31 - 1, "head_dim": 2**31 - 1}},
    {"attn_layer_idx": [0], "attn_cfg": {"num_heads": 2, "mlp_dim": 2**31 - 1}},
]


@pytest.mark.parametrize("changes", LARGE)
def test_sizes_that_fit_no_memory(tmp_path, made, changes):
    save(tmp_path)
    made.clear()
    write_config(tmp_path, **changes)
    text = error_of(tmp_path)
    assert "does not fit its config.json" in text or "config.json of" in text
    assert all(parameter.is_meta for block in made for parameter in block.parameters())


def test_names_of_a_file_in_errors(tmp_path):
    model = save(tmp_path)
    state = {**model.state_dict(), "\x1b[2J": torch.ones(1), "y" * 10**6: torch.ones(1)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    text = error_of(tmp_path)
    assert "unexpected: '\\x1b[2J', 'yyy" in text
    write_config(tmp_path, **{f"k{i}": 1 for i in range(10**5)})
    assert "unknown k0, k1, k10, k100, k1000 and 99995 more" in error_of(tmp_path)
    write_config(tmp_path, **{"z" * 10**6: 1})
    error_of(tmp_path)
    write_config(tmp_path, d_model=[1] * 10**6)
    assert "d_model must be a positive integer, got [1, 1, 1" in error_of(tmp_path)


MIXERS = {
    "Mamba1": ({}, None),
    "Mamba1 v3": ({"bimamba_type": "v3", "init_layer_scale": 0.5, "dt_init": "constant"}, None),
    "Mamba2": ({"layer": "Mamba2", "D_has_hdim": True, "conv_init": 0.5, **HEADS}, None),
    "Mamba3": ({"layer": "Mamba3", **HEADS}, None),
    "Mamba3 MIMO": ({"layer": "Mamba3", "is_mimo": True, "mimo_rank": 3, "is_outproj_norm": True, **HEADS}, None),
    "BiMamba2": ({"layer": "BiMamba2", "combine": "gate", "shared_proj": False, **HEADS}, None),
    "Hydra": ({"layer": "Hydra", **HEADS}, None),
    "hybrid": ({"layer": "Mamba2", **HEADS}, [1, 1]),
    "attention": ({}, [1, 0]),
}


@pytest.mark.parametrize("rest", [{}, {"rms_norm": False, "d_intermediate": 9, "tie_embeddings": False}])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_kind_of_layer_fits_itself(tmp_path, mixer, rest):
    ssm_cfg, attention = MIXERS[mixer]
    attn_cfg = {"num_heads": 2, "d_conv": 3} if attention else {}
    options = {"ssm_cfg": ssm_cfg, "attn_layer_idx": attention, "attn_cfg": attn_cfg, **rest}
    model = save(tmp_path, **options)
    found = MambaLMHeadModel.from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.pop(name), tensor)
    assert not found
    name, tensor = list(model.backbone.layers[1].state_dict(prefix="backbone.layers.1.").items())[-1]
    cut = tensor[..., :-1]
    torch.save({**model.state_dict(), name: cut}, tmp_path / "pytorch_model.bin")
    text = error_of(tmp_path)
    assert f"of another shape: {name} {tuple(cut.shape)} instead of {tuple(tensor.shape)}" in text


def test_the_comparison_imports_no_compiler(tmp_path):
    """torch imports one for the first function on the meta device: a second, and 70 MB."""
    code = "import sys, torch; from mamba_ssm import MambaLMHeadModel as model; before = set(sys.modules);"
    for i, layer in enumerate(("Mamba1", "Mamba2", "Mamba3")):
        cfg = {"layer": layer, **({} if layer == "Mamba1" else HEADS)}
        save(tmp_path / str(i), ssm_cfg=cfg, attn_layer_idx=[1], attn_cfg={"num_heads": 2}, d_intermediate=8)
        code += f"model.from_pretrained({str(tmp_path / str(i))!r});"
    code += "print(*(name for name in set(sys.modules) - before if name.startswith(('sympy', 'torch._decomp'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert not done.stdout.strip()


class WithGates(MambaLMHeadModel):
    """A parameter for each layer, which its constructor adds."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.gates = nn.Parameter(torch.ones(config.n_layer))


def test_a_subclass(tmp_path):
    model = WithGates(MambaConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    assert torch.equal(WithGates.from_pretrained(tmp_path, dtype="float64").gates, model.gates)
    assert "unexpected: gates" in error_of(tmp_path)
    save(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit .*: missing: gates"):
        WithGates.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "dtype", ["complex64", "complex128", "int8", "int64", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]
)
def test_weights_that_would_have_to_be_cast(tmp_path, dtype):
    model = save(tmp_path)
    kind = getattr(torch, dtype)
    state = {name: tensor.to(kind) for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    text = error_of(tmp_path)
    assert f"must be float32, float16, bfloat16 or float64, got backbone.embedding.weight {dtype}, " in text
    assert text.count(f" {dtype}") == 5 and " and 18 more" in text


def test_a_head_of_another_dtype_than_the_embedding_it_is_tied_to(tmp_path):
    state = save(tmp_path).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].double()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert "lm_head.weight differs from backbone.embedding.weight" in error_of(tmp_path)


def test_a_small_file_of_a_huge_tensor(tmp_path):
    state = save(tmp_path).state_dict()
    state["backbone.embedding.weight"] = torch.ones(1).expand(10**12, 16)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert "backbone.embedding.weight must hold all of its elements, got one of shape" in error_of(tmp_path)
