"""What blocks are called with: devices and dtypes that do not go together are refused, naming both."""

import re

import pytest
import torch
import torch.nn as nn

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.bimamba2 import BiMamba2
from mamba_ssm.modules.hydra import Hydra
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.modules.mamba3 import Mamba3
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.modules.mha import MHA
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.reference import plain_torch

WIDTH = 16
SCANS = {
    "Mamba": lambda: Mamba(WIDTH),
    "Mamba, by parts": lambda: Mamba(WIDTH, use_fast_path=False),
    "Mamba, v1": lambda: Mamba(WIDTH, bimamba_type="v1"),
    "Mamba, v2": lambda: Mamba(WIDTH, bimamba_type="v2"),
    "Mamba, v3": lambda: Mamba(WIDTH, bimamba_type="v3", nslices=5),
    "Mamba, v2 by parts": lambda: Mamba(WIDTH, bimamba_type="v2", use_fast_path=False),
    "Mamba2": lambda: Mamba2(WIDTH, headdim=8),
    "Mamba2, by parts": lambda: Mamba2(WIDTH, headdim=8, use_mem_eff_path=False),
    "Mamba2Simple": lambda: Mamba2Simple(WIDTH, headdim=8),
    "Mamba3": lambda: Mamba3(WIDTH, headdim=8),
    "Mamba3, norm": lambda: Mamba3(WIDTH, headdim=8, is_mimo=True, mimo_rank=2, is_outproj_norm=True),
    "BiMamba2": lambda: BiMamba2(WIDTH, headdim=8),
    "BiMamba2, gate": lambda: BiMamba2(WIDTH, headdim=8, combine="gate", shared_proj=False),
    "Hydra": lambda: Hydra(WIDTH, headdim=8),
}
IN_TORCH = {
    "MHA": lambda: MHA(WIDTH, 2, mlp_dim=256),
    "MHA, convolution": lambda: MHA(WIDTH, 2, d_conv=4),
    "GatedMLP": lambda: GatedMLP(WIDTH),
}
LAYERS = {**SCANS, **IN_TORCH}
every_layer = pytest.mark.parametrize("name", LAYERS)
every_scan = pytest.mark.parametrize("name", SCANS)


def made(name, **factory):
    layer = LAYERS[name]()
    return layer.to(**factory) if factory else layer


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@every_layer
def test_meta_inputs_of_a_layer_with_weights(name, grad):
    owner = name.split(",")[0]
    first = "fc1" if owner == "GatedMLP" else "in_proj"
    for layer_device, device in (("cpu", "meta"), ("meta", "cpu")):
        layer = made(name, device=layer_device)
        message = f"{owner}: the input must be on {layer_device} like {first}.weight, got {device}"
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=re.escape(message)):
            layer(torch.randn(2, 5, WIDTH, device=device, requires_grad=grad))


@pytest.mark.parametrize("mode", ["grad", "no_grad", "plain_torch"])
@every_layer
def test_one_parameter_on_another_device(name, mode):
    """As after a load that left one out: whichever it is, there is an error, and not memory that nobody has written."""
    x = torch.randn(2, 5, WIDTH)
    for parameter in dict(made(name).named_parameters()):
        layer = made(name)
        module, _, attribute = parameter.rpartition(".")
        owner = layer.get_submodule(module)
        setattr(owner, attribute, nn.Parameter(getattr(owner, attribute).detach().to("meta")))
        with torch.set_grad_enabled(mode == "grad"), plain_torch(mode == "plain_torch"):
            try:
                layer(x)
            except (ValueError, RuntimeError) as error:
                assert re.search(r"(must be|is not) on .*(meta|cpu)", str(error))
            else:
                pytest.fail(f"{parameter} was on meta, and the layer computed with it")


@every_layer
def test_all_on_meta_is_shape_inference(name):
    x = torch.randn(2, 5, WIDTH, device="meta", requires_grad=True)
    out = made(name, device="meta")(x)
    assert out.is_meta and out.shape == x.shape
    out.sum().backward()
    assert x.grad.is_meta and x.grad.shape == x.shape


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_a_step_and_a_cache_on_another_device(name):
    layer = made(name)
    layer.layer_idx = 0
    x = torch.randn(2, 1, WIDTH)
    states = layer.allocate_inference_cache(2, 5)
    with pytest.raises(ValueError, match=f"{name}: the input must be on cpu like in_proj.weight, got meta"):
        layer.step(x.to("meta"), *states)
    params = InferenceParams(max_seqlen=5, max_batch_size=2)
    params.key_value_memory_dict[0] = tuple(state.to("meta") for state in states)
    with pytest.raises(ValueError, match=f"{name}: the states in the cache must be on cpu like the layer, got meta"):
        layer(torch.randn(2, 5, WIDTH), inference_params=params)


def test_a_cache_of_attention_on_another_device():
    layer = MHA(WIDTH, 2, layer_idx=0)
    params = InferenceParams(max_seqlen=5, max_batch_size=2)
    params.key_value_memory_dict[0] = layer.allocate_inference_cache(2, 5, device="meta")
    with pytest.raises(ValueError, match="MHA: the cache must be on cpu like the input, got meta"):
        layer(torch.randn(2, 3, WIDTH), inference_params=params)


@every_layer
def test_seq_idx_on_another_device(name):
    if name in ("Hydra", "GatedMLP", "Mamba, v3"):
        pytest.skip("takes no seq_idx")
    with pytest.raises(ValueError, match="seq_idx must be on cpu like the input, got meta"):
        made(name)(torch.randn(2, 5, WIDTH), seq_idx=torch.zeros(2, 5, dtype=torch.int32, device="meta"))


def test_a_language_model():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    model = MambaLMHeadModel(MambaConfig(d_model=WIDTH, n_layer=1, vocab_size=24, tie_embeddings=False))
    message = "MixerModel: input_ids must be on cpu like embedding.weight, got meta"
    with pytest.raises(ValueError, match=message):
        model(tokens.to("meta"))
    with pytest.raises(ValueError, match="generate: input_ids must hold tokens, got a meta tensor"):
        model.generate(tokens.to("meta"), max_length=8)
    head = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(head.detach().to("meta"))
    with pytest.raises(ValueError, match="the hidden states must be on meta like lm_head"):
        model(tokens)
    assert model.to("meta")(tokens.to("meta")).logits.is_meta


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "bool", "complex64"])
@every_layer
def test_inputs_of_another_dtype(name, dtype):
    owner = name.split(",")[0]
    first = "fc1" if owner == "GatedMLP" else "in_proj"
    message = f"{owner}: the input must have the dtype of {first}.weight, float32, got {dtype}: convert it with "
    x = torch.ones(2, 5, WIDTH).to(getattr(torch, dtype))
    with pytest.raises(TypeError, match=re.escape(message + ".to(torch.float32)")) as caught:
        made(name)(x)
    assert ("torch.autocast" in str(caught.value)) == (dtype == "float16")
    if dtype != "float16":
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=re.escape(message)):
            made(name)(x)


@every_layer
def test_inputs_that_autocast_casts(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(name)(torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)).isfinite().all()
        assert made(name, dtype=torch.bfloat16)(torch.randn(2, 5, WIDTH)).isfinite().all()


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@every_scan
def test_layers_in_a_dtype_without_kernels(name, dtype):
    dtype = getattr(torch, dtype)
    layer = made(name)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    message = "the input must be float32, float16 or bfloat16, got "
    with pytest.raises(TypeError, match=f"{name.split(',')[0]}: {message}"):
        layer(torch.randn(2, 5, WIDTH, dtype=dtype))


def test_layers_of_torch_alone_compute_in_float64():
    for name in ("MHA", "GatedMLP"):
        assert made(name, dtype=torch.float64)(torch.randn(2, 5, WIDTH).double()).dtype == torch.float64
    with plain_torch():
        assert made("Mamba", dtype=torch.float64)(torch.randn(2, 5, WIDTH).double()).dtype == torch.float64
