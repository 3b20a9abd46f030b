"""What a configuration says is checked before it is used: errors name file, field, value and what it must be."""

import json
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.bimamba2 import BiMamba2
from mamba_ssm.modules.hydra import Hydra
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.modules.mamba3 import Mamba3
from mamba_ssm.modules.mamba_simple import Mamba

CONFIG = {"d_model": 16, "n_layer": 2, "vocab_size": 21}
ATTENTION = {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 2}}
FLAGS = ("rms_norm", "residual_in_fp32", "fused_add_norm", "tie_embeddings")

WRONG_FIELDS = [
    *[(name, value, "a positive integer") for name in CONFIG for value in (0, -1, "2", 2.0, True, None, [2])],
    ("pad_vocab_size_multiple", 0, "a positive integer"),
    ("d_intermediate", -1, "an integer of at least 0"),
    *[(name, value, "True or False") for name in FLAGS for value in ("false", "true", None, 2, [])],
    *[(name, value, "arguments by name") for name in ("ssm_cfg", "attn_cfg") for value in ("Mamba2", 1, ["layer"])],
    *[("attn_layer_idx", value, "a list of layers from 0 to n_layer - 1 = 1") for value in (5, "1", [2], [-1], ["1"])],
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG_FIELDS)
def test_wrong_fields(tmp_path, name, value, expected):
    config = {**CONFIG, name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        MambaLMHeadModel.from_pretrained(tmp_path)
    text = str(error.value)
    assert f"config.json of {str(tmp_path)!r}: {name} must " in text
    assert expected in text and text.endswith(f"got {value!r}")
    with pytest.raises(ValueError, match=f"MambaConfig: {name} must "):
        MambaLMHeadModel(MambaConfig(**config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssm_cfg": {"layer": "Mamba4"}}, r"ssm_cfg\['layer'\] must be one of 'Mamba1', .*, 'Hydra', got 'Mamba4'"),
        ({"ssm_cfg": {"layer": ["Mamba2"]}}, r"ssm_cfg\['layer'\] must be one of .*, got \['Mamba2'\]"),
        ({"ssm_cfg": {"d_stat": 4}}, "ssm_cfg: 'd_stat' is none of Mamba's arguments, d_state, "),
        ({"ssm_cfg": {"layer": "Mamba2", "d_model": 4}}, "ssm_cfg: 'd_model' is none of Mamba2's arguments, d_state, "),
        *[
            ({"ssm_cfg": {"layer": "Mamba3", name: 1}}, f"ssm_cfg: '{name}' is none of Mamba3's arguments, d_state, ")
            for name in ("d_model", "device", "dtype", "layer_idx")
        ],
        ({"ssm_cfg": {"d_state": "16"}}, "Mamba: d_state must be an integer from 1 to 256, got '16'"),
        ({"ssm_cfg": {"expand": "2"}}, r"Mamba: expand must be a number of at least 0, got '2'"),
        (
            {"ssm_cfg": {"expand": 0.05}},
            r"expand \* d_model must be from 1 to 2147483647, got expand 0\.05",
        ),
        ({"ssm_cfg": {"expand": 1e308}}, r"expand must be a number of at least 0, finite in float32, got 1e\+308"),
        ({"ssm_cfg": {"bias": "false"}}, "Mamba: bias must be True or False .*, got 'false'"),
        ({"ssm_cfg": {"dt_min": None}}, "dt_min and dt_max must be positive, .* got None, "),
        ({"ssm_cfg": {"dt_scale": "1"}}, "Mamba: dt_scale must be a number of at least 0, got '1'"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8.0}}, r"Mamba2: headdim must be an integer .*, got 8\.0"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "ngroups": "1"}}, "ngroups must be a positive integer, got '1'"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "rmsnorm": "false"}}, "rmsnorm must be True or False"),
        (
            {"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "A_init_range": 1}},
            r"A_init_range must be \(.*\), got 1",
        ),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "conv_init": "1"}}, "conv_init must be a number .*, got '1'"),
        ({**ATTENTION, "attn_cfg": {}}, "attn_cfg: MHA needs 'num_heads', got {}"),
        ({**ATTENTION, "attn_cfg": {"num_heads": 2, "heads": 2}}, "attn_cfg: 'heads' is none of MHA's arguments"),
        ({**ATTENTION, "attn_cfg": {"num_heads": "2"}}, "MHA: num_heads must be a positive integer, got '2'"),
        ({**ATTENTION, "attn_cfg": {"num_heads": 2, "causal": "false"}}, "MHA: causal must be True or False"),
        ({**ATTENTION, "attn_cfg": {"num_heads": 2, "softmax_scale": "1"}}, "MHA: softmax_scale must be a number"),
    ],
)
def test_wrong_arguments_of_a_layer(options, message):
    with pytest.raises(ValueError, match=message):
        MambaLMHeadModel(MambaConfig(**CONFIG, **options))


@pytest.mark.parametrize("block", [Mamba, Mamba2, Mamba2Simple])
def test_a_width_that_rounds_to_0(block):
    with pytest.raises(ValueError, match=rf"{block.__name__}: expand \* d_model must be from 1 .* and d_model 49"):
        block(49, expand=1 / 49)  # times 49, in floating point: less than 1


NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e308, 10**400, 10**5000, True, "2", None, [2], {}, 2j]
BLOCKS = {Mamba: {}, Mamba2: {"headdim": 8}, Mamba2Simple: {"headdim": 8}, Mamba3: {"headdim": 8}}
BLOCKS.update({BiMamba2: {"headdim": 8}, Hydra: {"headdim": 8}})
SIZES = {
    Mamba: ["d_model", "d_state", "d_conv", "dt_rank", "nslices"],
    Mamba2: ["d_model", "d_state", "d_conv", "headdim", "d_ssm", "ngroups", "chunk_size"],
    Mamba2Simple: ["d_model", "d_state", "d_conv", "headdim", "ngroups", "chunk_size"],
    Mamba3: ["d_model", "d_state", "headdim", "ngroups", "mimo_rank"],
    BiMamba2: ["d_model", "d_state", "d_conv", "headdim", "ngroups", "chunk_size"],
    Hydra: ["d_model", "d_state", "d_conv", "headdim", "ngroups", "chunk_size"],
}
OPTIONAL = {"d_ssm", "conv_init", "init_layer_scale", "softmax_scale"}  # None is allowed
VALUES = {
    Mamba: ["expand", "dt_min", "dt_max", "dt_init_floor", "dt_scale", "init_layer_scale"],
    Mamba2: ["expand", "dt_min", "dt_max", "dt_init_floor", "conv_init"],
    Mamba2Simple: ["expand", "dt_min", "dt_max", "dt_init_floor", "conv_init"],
    Mamba3: ["expand", "dt_min", "dt_max", "dt_init_floor", "A_floor", "rope_fraction"],
    BiMamba2: ["expand", "dt_min", "dt_max", "dt_init_floor", "conv_init"],
    Hydra: ["expand", "dt_min", "dt_max", "dt_init_floor", "conv_init"],
}
ARGUMENTS = [
    (block, name, NUMBERS + more)
    for table, more in ((SIZES, [0, -1, 2.0, 2**31]), (VALUES, [-1e39]))
    for block, names in table.items()
    for name in names
]


@pytest.mark.parametrize(("block", "name", "values"), ARGUMENTS, ids=lambda value: getattr(value, "__name__", None))
def test_wrong_numbers_of_a_block(block, name, values):
    for value in values:
        if value is None and name in OPTIONAL:
            continue
        with pytest.raises(ValueError) as error:
            block(**{"d_model": 16, **BLOCKS[block], name: value})
        text = str(error.value)
        assert name in text and "must be" in text and len(text) < 400
        thousands_of_digits = isinstance(value, int) and value > 10**1000
        assert "an integer, too long to show" in text if thousands_of_digits else repr(value)[:90] in text


WRONG_RANGES = "12", [1, float("inf")], [0, 1], [2, 1], [1], {"a": 1, "b": 2}, [True, 2], [1, 10**400]


@pytest.mark.parametrize("value", WRONG_RANGES)
def test_wrong_ranges(value):
    for block in (Mamba2, Mamba2Simple, BiMamba2, Hydra):
        with pytest.raises(ValueError, match=rf"{block.__name__}: A_init_range must be "):
            block(16, headdim=8, A_init_range=value)


def test_a_process_group_is_none_of_config_json():
    for block in (Mamba2, Mamba3):
        for value in ("default", 0, {}, [1]):
            with pytest.raises(ValueError, match=f"{block.__name__}: process_group must be a process group of torch"):
                block(16, headdim=8, process_group=value)


def test_layers_of_attention_that_are_none():
    for value in ([True], [1.0], {"1": 1}, {}, "", [10**400], [None], [[1]], 1, True):
        with pytest.raises(ValueError, match="attn_layer_idx must be a list of layers from 0 to n_layer - 1 = 1, got"):
            MambaLMHeadModel(MambaConfig(**CONFIG, attn_layer_idx=value, attn_cfg={"num_heads": 2}))


def test_unknown_arguments_of_mamba3_are_counted():
    with pytest.warns(UserWarning, match="no effect: x0, x1, x2, x3, x4 and 995 more"):
        Mamba3(16, headdim=8, **{f"x{i}": 1 for i in range(1000)})


def test_what_is_meant_is_taken():
    np = pytest.importorskip("numpy")
    config = MambaConfig.from_dict({**CONFIG, "ssm_cfg": None, "attn_cfg": None, "attn_layer_idx": None})
    MambaLMHeadModel(config)
    config = MambaConfig(d_model=np.int64(16), n_layer=2, vocab_size=21, rms_norm=1, tie_embeddings=np.bool_(False))
    config.attn_layer_idx, config.attn_cfg = range(1, 2), {"num_heads": np.int32(2)}
    config.ssm_cfg = {"expand": np.float32(1.5), "d_state": np.int64(4)}
    model = MambaLMHeadModel(config)
    assert model.backbone.layers[0].mixer.d_inner == 24


@dataclass
class WithPadding(MambaConfig):
    pad_token_id: int = 0


def test_any_object_with_the_attributes_is_a_configuration(tmp_path):
    cfg = MappingProxyType({"layer": "Mamba2", "headdim": 8})
    for config in SimpleNamespace(**CONFIG, ssm_cfg=cfg, note=object()), WithPadding(**CONFIG, ssm_cfg=cfg):
        model = MambaLMHeadModel(config)  # what it does not say has MambaConfig's defaults
        assert model.config is config and isinstance(model.backbone.layers[0].mixer, Mamba2)
        assert model.lm_head.weight is model.backbone.embedding.weight
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved.pop("pad_token_id", None) == getattr(config, "pad_token_id", None)
        assert MambaConfig.from_dict(saved) == MambaConfig(**CONFIG, ssm_cfg=dict(cfg))
    with pytest.raises(ValueError, match="MambaConfig: n_layer must be a positive integer, got '2'"):
        MambaLMHeadModel(SimpleNamespace(**{**CONFIG, "n_layer": "2"}))
    with pytest.raises(ValueError, match="MambaConfig: d_model must be a positive integer, got 0"):
        MambaLMHeadModel(WithPadding(**{**CONFIG, "d_model": 0}))
