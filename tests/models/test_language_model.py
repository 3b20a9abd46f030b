"""A language model as a user has it: trained on real text, saved, loaded, generating; packed and hybrid models."""

import copy
from pathlib import Path

import pytest
import torch

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils.generation import InferenceParams

LAYERS = {
    "mamba": {"layer": "Mamba1"},
    "mamba2": {"layer": "Mamba2", "headdim": 16, "d_state": 16, "chunk_size": 32},
    "mamba3": {"layer": "Mamba3", "headdim": 16, "d_state": 16},
    "mimo": {"layer": "Mamba3", "headdim": 16, "d_state": 16, "is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
}
ATTENTION = {
    "attn_layer_idx": [1, 3],
    "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 8, "d_conv": 4},
    "d_intermediate": 64,
}
MODELS = {
    "mamba": {"ssm_cfg": LAYERS["mamba"]},
    "mamba2": {"ssm_cfg": LAYERS["mamba2"]},
    "mamba3": {"ssm_cfg": LAYERS["mamba3"]},
    "mimo": {"ssm_cfg": LAYERS["mimo"]},
    "hybrid": {"ssm_cfg": LAYERS["mamba2"], "n_layer": 5, **ATTENTION},
    "hybrid of mamba": {"ssm_cfg": LAYERS["mamba"], "n_layer": 4, **ATTENTION},
}


def make(kind, device, **options):
    torch.manual_seed(0)
    config = {"d_model": 64, "n_layer": 2, "vocab_size": 128, **MODELS[kind], **options}
    return MambaLMHeadModel(MambaConfig(**config), device=device)


@pytest.fixture(scope="module")
def text():
    """The license's second section on, as bytes: English that every copy of this project carries."""
    license = Path(__file__).parents[2] / "LICENSE"
    return torch.tensor(list(license.read_bytes()[1000:3000]))


def train(model, text, steps):
    """The loss of each step, 8 windows of 64 bytes."""
    device = model.lm_head.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 64, (8,), generator=generator)
        batch = torch.stack([text[start : start + 65] for start in starts]).to(device)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "mamba3", "mimo", "hybrid"])
def test_learns_text_and_comes_back_from_disk(kind, text, device, tmp_path):
    """The loss starts at log(128) = 4.85; drawing bytes by their frequency costs 2.9; it must fall below 1.0."""
    model = make(kind, device)
    losses = train(model, text, 70 if kind not in ("mamba3", "mimo") else 120)  # these have no convolution
    assert losses[0] > 4.5
    assert sum(losses[-10:]) / 10 < 1.0, losses[::5]

    model.save_pretrained(tmp_path)
    loaded = MambaLMHeadModel.from_pretrained(tmp_path, device=device)
    prompt = text[None, :48].to(device)
    written = model.generate(prompt, max_length=148)
    assert torch.equal(loaded.generate(prompt, max_length=148), written)
    # it writes English, most words of which the text has
    words = bytes(written[0, 48:].tolist()).split()
    known = set(bytes(text.tolist()).split())
    assert sum(word in known for word in words) > len(words) / 2, bytes(written[0].tolist())
    if device == "cuda":
        assert torch.equal(model.generate(prompt, max_length=148, cg=True), written)
        assert torch.equal(loaded.generate(prompt, max_length=148, cg=True), written)


@pytest.mark.parametrize("kind", MODELS)
def test_prefill_and_steps_equal_one_forward(kind, device):
    model = make(kind, device)
    tokens = torch.randint(0, 128, (2, 40), device=device)
    params = InferenceParams(max_seqlen=40, max_batch_size=2)
    with torch.no_grad():
        logits = [model(tokens[:, :33], inference_params=params).logits]
        for t in range(33, 40):
            params.seqlen_offset = t
            logits.append(model(tokens[:, t : t + 1], inference_params=params).logits)
        expected = model(tokens).logits
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens, num_last_tokens=3).logits, expected[:, -3:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cuts", [(20,), (1, 2, 4, 7, 38, 39)], ids=str)
def test_a_prompt_in_pieces_equals_one_forward(cuts, kind, device):
    """Also with gradients on: those of the piece's own parameters, since the states carry none."""
    model = make(kind, device)
    tokens = torch.randint(0, 128, (2, 40), device=device)
    params = InferenceParams(max_seqlen=40, max_batch_size=2)
    logits = []
    for start, end in zip((0, *cuts), (*cuts, 40), strict=True):
        params.seqlen_offset = start
        logits.append(model(tokens[:, start:end], inference_params=params).logits)
        logits[-1].square().mean().backward()
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("kind", MODELS)
def test_packed_sequences_equal_separate_ones(kind, device):
    """Logits, and the gradients of the parameters, of three sequences packed in one row."""
    model = make(kind, device)
    tokens = torch.randint(0, 128, (1, 80), device=device)
    bounds = [(0, 33), (33, 34), (34, 80)]
    apart = torch.cat([model(tokens[:, start:end]).logits for start, end in bounds], dim=1)
    seq_idx = torch.zeros(1, 80, dtype=torch.int32, device=device)
    seq_idx[:, 33:] = 1
    seq_idx[:, 34:] = 2
    packed = model(tokens, seq_idx=seq_idx).logits
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(apart)
    parameters = list(model.parameters())
    for found, expected in zip(
        torch.autograd.grad(packed, parameters, weights), torch.autograd.grad(apart, parameters, weights), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kind", ["mamba2", "mamba3", "mimo", "hybrid"])
def test_packed_prompts_then_steps(kind, padding, device):
    """Prompts of different lengths are read packed (cu_seqlens), then continue together, as each alone would. Tokens
    behind the last one, which fill a row up, are in no state.
    """
    model = make(kind, device)
    lengths, new = [5, 1, 40], 6
    sequences = [torch.randint(0, 128, (1, length + new), device=device) for length in lengths]
    with torch.no_grad():
        expected = torch.cat([model(sequence).logits[:, -new - 1 : -1] for sequence in sequences])
        params = InferenceParams(max_seqlen=46, max_batch_size=3)
        prompts = torch.cat([sequence[:, :-new] for sequence in sequences], dim=1)
        prompts = torch.nn.functional.pad(prompts, (0, padding), value=7)
        cu_seqlens = torch.tensor([0, 5, 6, 46], dtype=torch.int32, device=device)
        seq_idx = torch.repeat_interleave(torch.arange(3, device=device), cu_seqlens.diff(), output_size=46)
        seq_idx = torch.nn.functional.pad(seq_idx, (0, padding), value=3)
        options = {"seq_idx": seq_idx[None].int(), "cu_seqlens": cu_seqlens}
        logits = model(prompts, inference_params=params, **options).logits
        found = [logits[0, cu_seqlens[1:].long() - 1]]
        params.lengths_per_sample = cu_seqlens.diff()
        for t in range(new - 1):
            params.seqlen_offset += 1
            tokens = torch.cat([sequence[:, -new + t : -new + t + 1] for sequence in sequences])
            found.append(model(tokens, inference_params=params).logits[:, 0])
            params.lengths_per_sample = params.lengths_per_sample + 1
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_low_precision(kind, device):
    model = make(kind, device)
    tokens = torch.randint(0, 128, (2, 40), device=device)
    expected = model(tokens).logits
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(tokens).logits
    assert logits.dtype == torch.bfloat16
    # the residual is float32; each layer's output is rounded to 8 bits
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.03)
    narrow = copy.deepcopy(model).bfloat16()
    logits = narrow(tokens).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "mamba3", "mimo"])
def test_compile(kind, device):
    model = make(kind, device, n_layer=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 128, (2, 40), device=device)
    out, expected = compiled(tokens).logits, model(tokens).logits
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    parameters = list(model.parameters())
    found = torch.autograd.grad(out.square().sum(), parameters)
    for ours, theirs in zip(found, torch.autograd.grad(expected.square().sum(), parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * max(1.0, theirs.abs().max().item()))
