"""quantize(): every kind of block and model, its checkpoints, copies, LoRA on it, and what it refuses."""

import copy
import importlib
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from mamba_ssm import CheckpointError, Mamba, Mamba2, MambaLMHeadModel, quantize
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.quantized import QuantizedEmbedding, QuantizedLinear
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.kernels import launched, without

LAYERS = {
    "Mamba1": {},
    "Mamba2": {"headdim": 16},
    "Mamba2 mlp": {"headdim": 16, "d_ssm": 64},
    "Mamba3": {"headdim": 16, "d_state": 16},
    "Hydra": {"headdim": 16},
    "BiMamba2": {"headdim": 16},
}


def model_of(layer="Mamba2", seed=0, **options):
    """Two layers of a kind around one of attention, with MLPs: everything that is quantised."""
    torch.manual_seed(seed)
    ssm_cfg = {"layer": layer.split()[0], **LAYERS[layer]}
    sizes = {"d_model": 48, "n_layer": 3, "vocab_size": 61, "d_intermediate": 64, "attn_layer_idx": [1]}
    config = {**sizes, "attn_cfg": {"num_heads": 4, "causal": True}, "ssm_cfg": ssm_cfg, **options}
    return MambaLMHeadModel(MambaConfig(**config)).eval()


def tokens_of(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", LAYERS)
def test_logits_and_bytes(layer):
    """At most 3 times the error that bfloat16 has: a weight's error is 1/254 of its block's largest, twice bfloat16's
    1/512 of itself, and activations add to the latter's.
    """
    model, tokens = model_of(layer), tokens_of(2, 20)
    expected = model(tokens).logits
    narrow = copy.deepcopy(model).bfloat16()(tokens).logits.float()
    before = sum(t.numel() * t.element_size() for t in {id(t): t for t in model.parameters()}.values())
    assert quantize(model) is model
    found = model(tokens).logits
    assert (found - expected).norm() < 3 * (narrow - expected).norm()
    large = [module for module in model.modules() if isinstance(module, (QuantizedLinear, QuantizedEmbedding))]
    assert all(module.weight.dtype == torch.int8 for module in large)
    after = sum(t.numel() * t.element_size() for t in {id(t): t for t in model.parameters()}.values())
    assert after < 0.4 * before  # these small blocks have many parameters that stay
    plain = {name.split(".")[-1] for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain <= {"dt_proj", "gate_proj", "fc_D"}
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if "norm" in name or "A_log" in name)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba2 mlp", "Mamba3"])
@pytest.mark.parametrize("batch", [1, 12])  # few rows and many
def test_decoding_is_the_forward_pass(layer, batch):
    model, prompt = quantize(model_of(layer)), tokens_of(batch, 5)
    out = model.generate(prompt, max_length=10, return_dict_in_generate=True, output_scores=True)
    scores = model(out.sequences).logits[:, 4:-1, :61]
    torch.testing.assert_close(torch.stack(out.scores, dim=1), scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    model, tokens = quantize(model_of()), tokens_of(2, 9)
    expected = model(tokens).logits
    scales = model.lm_head.scales.clone()
    model.to(dtype)
    assert torch.equal(model.lm_head.scales, scales) and model.lm_head.weight.dtype == torch.int8
    found = model(tokens).logits
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05)
    back = model.float()(tokens).logits
    assert back.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(tokens).logits.float(), expected, rtol=0, atol=0.05)


def test_tied_weights_are_one_storage_and_stay_so():
    model = quantize(model_of())
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).bfloat16()):
        embedding = same.backbone.embedding
        assert same.lm_head.weight is embedding.weight and same.lm_head.scales is embedding.scales
        same.tie_weights()
        assert same.lm_head.weight is embedding.weight and same.lm_head.scales is embedding.scales
    apart = quantize(model_of(tie_embeddings=False))
    assert apart.lm_head.weight is not apart.backbone.embedding.weight


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_checkpoints(tmp_path, tied, safe):
    if safe:
        pytest.importorskip("safetensors")
    model, tokens = quantize(model_of("Mamba1", tie_embeddings=tied)), tokens_of(2, 9)
    model.save_pretrained(tmp_path, safe_serialization=safe)
    assert json.loads((tmp_path / "config.json").read_text())["quantization"] == "int8"
    found = MambaLMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert {name: t.dtype for name, t in found.state_dict().items()} == {
        n: t.dtype for n, t in model.state_dict().items()
    }
    assert (found.lm_head.scales is found.backbone.embedding.scales) == tied
    narrow = MambaLMHeadModel.from_pretrained(tmp_path, dtype="bfloat16")
    assert narrow(tokens).logits.dtype == torch.bfloat16 and narrow.lm_head.scales.dtype == torch.float16
    other = quantize(model_of("Mamba1", seed=1, tie_embeddings=tied))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens).logits, model(tokens).logits)


def test_a_checkpoint_of_other_weights_has_no_such_field(tmp_path):
    model_of().save_pretrained(tmp_path)
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())


def _without_scales(config, state):
    for name in [name for name in state if name.endswith(".scales")]:
        del state[name]


def _with_wide_scales(config, state):
    state["backbone.layers.0.mixer.in_proj.scales"] = state["backbone.layers.0.mixer.in_proj.scales"].float()


def _with_float_weight(config, state):
    state["backbone.layers.0.mixer.in_proj.weight"] = state["backbone.layers.0.mixer.in_proj.weight"].float()


def _with_short_scales(config, state):
    state["backbone.layers.0.mixer.in_proj.scales"] = state["backbone.layers.0.mixer.in_proj.scales"][:, :1].clone()


def _with_another_head(config, state):
    state["lm_head.scales"] = 2 * state["lm_head.scales"]


def _with_scales_of_a_norm(config, state):
    state["backbone.norm_f.scales"] = state["lm_head.scales"]
    state["backbone.norm_f.weight"] = state["backbone.norm_f.weight"].to(torch.int8)


@pytest.mark.parametrize(
    "change,words",
    [
        (
            lambda config, state: config.update(quantization="int4"),
            'quantization must be "int8", or left out, got .int4.',
        ),
        (lambda config, state: config.pop("quantization"), "weights must be float32, float16, bfloat16 or float64"),
        (_without_scales, "no weight has scales beside it"),
        (_with_wide_scales, "in_proj.scales float32"),
        (_with_float_weight, "in_proj.weight float32"),
        (_with_short_scales, r"in_proj.scales \(\d+, 1\) instead of \(\d+, 2\)"),
        (_with_another_head, "lm_head.scales differs from backbone.embedding.scales"),
        (_with_scales_of_a_norm, "unexpected: backbone.norm_f.scales"),
    ],
)
def test_damaged_checkpoints(tmp_path, change, words):
    quantize(model_of()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    change(config, state)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=words):
        MambaLMHeadModel.from_pretrained(tmp_path)


def test_floating_weights_do_not_load_into_int8():
    model, state = model_of(), model_of().state_dict()
    quantize(model)
    with pytest.raises(RuntimeError, match=r"must be torch.int8, got torch.float32: load such weights .* before"):
        model.load_state_dict(state, strict=False)


def test_blocks_in_a_model_of_ones_own():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mamba(32, layer_idx=0), Mamba2(32, headdim=16, layer_idx=1)
            self.out = nn.Linear(32, 3)

        def forward(self, x):
            return self.out(self.second(self.first(x)))

    model, x = Classifier(), torch.randn(2, 7, 32)
    expected = model(x)
    quantize(model)
    assert type(model.out) is nn.Linear and isinstance(model.first.x_proj, QuantizedLinear)
    assert type(model.first.dt_proj) is nn.Linear
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0.05)
    names = set(model.state_dict())
    assert quantize(model) is model and set(model.state_dict()) == names  # nothing is left to do
    block = quantize(Mamba(32, layer_idx=0, bias=True))
    assert {"in_proj.weight", "in_proj.scales", "in_proj.bias", "x_proj.scales"} <= set(block.state_dict())
    params = InferenceParams(max_seqlen=7, max_batch_size=2)
    start = block(x[:, :6], inference_params=params)
    params.seqlen_offset = 6
    steps = torch.cat([start, block(x[:, 6:], inference_params=params)], dim=1)
    torch.testing.assert_close(steps, block(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_perplexity_of_a_trained_model(layer, monkeypatch):
    """Within 0.5 % of float32's, on text that it was not trained on; after 60 steps it is 1.4, and 256 before."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    text = importlib.import_module("train_language_model").read([])
    model = model_of(layer, d_model=64, n_layer=2, vocab_size=256, d_intermediate=0, attn_layer_idx=[])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        rows = text[torch.randint(len(text) - 5000, (8, 1)) + torch.arange(128)]
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    unseen = text[-8 * 512 :].view(8, 512)
    with torch.no_grad():
        loss = model(unseen, labels=unseen).loss
        assert loss < 0.6
        assert abs((quantize(model)(unseen, labels=unseen).loss - loss).exp() - 1) < 0.005


def test_training_goes_through_frozen_weights():
    model, tokens = quantize(model_of("Mamba1")), tokens_of(2, 12)
    loss = model(tokens, labels=tokens).loss
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, tokens[:, 1:].flatten()), rtol=1e-4, atol=1e-4)
    loss.backward()
    frozen = [
        p for module in model.modules() if isinstance(module, QuantizedLinear) for p in (module.weight, module.scales)
    ]
    assert all(not p.requires_grad and p.grad is None for p in frozen)
    assert model.backbone.layers[0].mixer.dt_proj.weight.grad.abs().sum() > 0


def test_lora():
    peft = pytest.importorskip("peft")
    model, tokens = quantize(model_of("Mamba1")), tokens_of(2, 12)
    before = model(tokens).logits
    options = {"target_modules": ["in_proj", "x_proj", "out_proj", "fc1"], "r": 4, "init_lora_weights": True}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options))
    torch.testing.assert_close(tuned(tokens).logits, before, rtol=1e-4, atol=1e-4)  # B starts as zeros
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = tuned(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad():
        out = tuned.base_model.model.generate(tokens[:, :5], max_length=8)
    assert out.shape == (2, 8)
    with pytest.raises(RuntimeError, match="can't be cast"):  # float weights are not added to int8 ones in silence
        tuned.merge_and_unload()


@pytest.mark.parametrize(
    "make,error,words",
    [
        (lambda: 3, TypeError, "model must be a torch.nn.Module, got int"),
        (lambda: nn.Linear(4, 4), ValueError, "has no layer of mamba_ssm"),
        (lambda: _hooked(Mamba(16)), TypeError, "out_proj must be an nn.Linear .* got one with hooks"),
        (lambda: _infinite(Mamba(16)), ValueError, "weights must be finite .* in x_proj"),
    ],
    ids=["number", "other", "hooks", "infinite"],
)
def test_what_cannot_be_quantised(make, error, words):
    with pytest.raises(error, match=words):
        quantize(make())


def _hooked(block):
    block.out_proj.register_forward_hook(lambda module, inputs, output: output)
    return block


def _infinite(block):
    block.x_proj.weight.data[0, 0] = float("inf")
    return block


def test_odd_tokens():
    model = quantize(model_of())
    with pytest.raises(ValueError, match=r"input_ids must be int64 \(B, L\), got torch.float32"):
        model(torch.ones(1, 3))
    with pytest.raises(ValueError, match="input_ids must be on cpu"):
        model(tokens_of(1, 3).to("meta"))
    with pytest.raises(IndexError):
        model(torch.tensor([[-1]]))


def test_meta_device():
    model = quantize(MambaLMHeadModel(model_of().config, device="meta"))
    assert model.lm_head.weight.is_meta
    assert model(tokens_of(1, 3).to("meta")).logits.shape == (1, 3, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba2 mlp"])
def test_the_norm_before_a_steps_in_proj(layer, cuda):
    """One kernel has both for one row, and tokens are those of the two; more rows, and gradients, have two."""
    model, prompt = quantize(model_of(layer).to(cuda, torch.bfloat16)), tokens_of(1, 5).to(cuda)
    with launched() as found:
        one = model.generate(prompt, max_length=12, return_dict_in_generate=True, output_scores=True)
    norms = sum(launch.launches for launch in found if launch.kernel.id.startswith("norm"))
    with without("linear/int8_one_row"), launched() as found:
        two = model.generate(
            one.sequences[:, :5], 12, teacher_outputs=one.sequences, output_scores=True, return_dict_in_generate=True
        )
    # 6 steps have a norm less in each of the two layers that are no attention, and before the head
    assert sum(launch.launches for launch in found if launch.kernel.id.startswith("norm")) - norms == 6 * 3
    torch.testing.assert_close(torch.stack(one.scores), torch.stack(two.scores), rtol=0, atol=0.02)
    cache = InferenceParams(max_seqlen=8, max_batch_size=1)
    model(prompt, inference_params=cache)
    cache.seqlen_offset = 5
    assert model(prompt[:, :1], inference_params=cache).logits.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_graphs(layer, cuda):
    """The graph's tokens are those of the eager steps, and both follow the forward pass."""
    model, prompt = quantize(model_of(layer).to(cuda, torch.bfloat16)), tokens_of(1, 5).to(cuda)
    options = {"max_length": 24, "return_dict_in_generate": True, "output_scores": True}
    eager = model.generate(prompt, **options)
    if torch.cuda.is_available():
        graph = model.generate(prompt, cg=True, teacher_outputs=eager.sequences, **options)
        torch.testing.assert_close(torch.stack(graph.scores), torch.stack(eager.scores), rtol=0, atol=0.02)
    full = model(eager.sequences).logits[:, 4:-1, :61]
    torch.testing.assert_close(torch.stack(eager.scores, dim=1), full, rtol=0, atol=0.05)
    moved = copy.deepcopy(model).cpu()
    assert moved.lm_head.scales is moved.backbone.embedding.scales
