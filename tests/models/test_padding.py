"""A language model of rows with different lengths: logits, loss and gradients are those of each row alone."""

import pytest
import torch

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.utils.generation import InferenceParams

SIZES = {"d_state": 8, "headdim": 8}
MODELS = {
    "mamba": {},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", **SIZES}},
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", **SIZES}},
    "hybrid": {
        "ssm_cfg": {"layer": "Mamba2", **SIZES},
        "attn_layer_idx": [1],
        "attn_cfg": {"num_heads": 4, "causal": True, "rotary_emb_dim": 4},
        "d_intermediate": 24,
    },
}
SPANS, LENGTH = [(0, 12), (4, 12), (0, 7), (2, 9), (11, 12)], 12


def make(kind, device="cpu"):
    torch.manual_seed(0)
    return MambaLMHeadModel(MambaConfig(**{"d_model": 16, "n_layer": 2, "vocab_size": 29, **MODELS[kind]})).to(device)


def batch(device="cpu"):
    steps, generator = torch.arange(LENGTH), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 29, (len(SPANS), LENGTH), generator=generator)
    mask = torch.stack([(steps >= start) & (steps < end) for start, end in SPANS])
    return tokens.to(device), mask.to(device)


@pytest.mark.parametrize("kind", MODELS)
def test_logits(kind, device):
    model, (tokens, mask) = make(kind, device), batch(device)
    found = model(tokens, attention_mask=mask).logits
    last = model(tokens, attention_mask=mask, num_last_tokens=1).logits
    assert found.isfinite().all()
    for row, (start, end) in enumerate(SPANS):
        expected = model(tokens[row : row + 1, start:end]).logits[0]
        torch.testing.assert_close(found[row, start:end], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[row], expected[-1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients(kind, device):
    """Labels at padding do not count, whatever they are, nor does what padding predicts."""
    model, (tokens, mask) = make(kind, device), batch(device)
    loss = model(tokens, attention_mask=mask, labels=tokens).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    parts = [model(tokens[row : row + 1, start:end]).logits[0] for row, (start, end) in enumerate(SPANS)]
    logits = torch.cat([part[:-1] for part in parts])
    labels = torch.cat([tokens[row, start + 1 : end] for row, (start, end) in enumerate(SPANS)])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for gradient, alone in zip(found, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(gradient, alone, rtol=1e-4, atol=1e-5)
    two = model(tokens, attention_mask=mask, labels=tokens, num_last_tokens=2).loss
    ends = [(part[-2], tokens[row, SPANS[row][1] - 1]) for row, part in enumerate(parts) if len(part) > 1]
    expected = torch.nn.functional.cross_entropy(torch.stack([e[0] for e in ends]), torch.stack([e[1] for e in ends]))
    torch.testing.assert_close(two, expected, rtol=1e-5, atol=1e-6)


def test_prefill_with_padding_behind_tokens():
    """Hidden states come back where their tokens are, and a step goes on from the last token."""
    model, (tokens, mask) = make("mamba3"), batch()
    cache = InferenceParams(20, len(SPANS))
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, inference_params=cache).logits
        torch.testing.assert_close(found[mask], model(tokens, attention_mask=mask).logits[mask], rtol=1e-4, atol=1e-5)
        cache.seqlen_offset = LENGTH
        step = model(tokens[:, :1], inference_params=cache).logits
        for row, (start, end) in enumerate(SPANS):
            whole = torch.cat([tokens[row, start:end], tokens[row, :1]])
            torch.testing.assert_close(step[row, -1], model(whole[None]).logits[0, -1], rtol=1e-4, atol=1e-5)


def test_wrong_calls():
    model, (tokens, mask) = make("mamba"), batch()
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, L\) = \(5, 12\)"):
        model(tokens, attention_mask=mask[:, :5])
    with pytest.raises(ValueError, match="attention_mask and seq_idx cannot be given together"):
        model(tokens, attention_mask=mask, seq_idx=torch.zeros_like(tokens, dtype=torch.int32))
    with pytest.raises(ValueError, match="attention_mask and seq_idx cannot be given together"):  # without padding, too
        model(tokens, attention_mask=torch.ones_like(mask), seq_idx=torch.zeros_like(tokens, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got list"):
        model([[1, 2]], attention_mask=mask)
    with pytest.raises(ValueError, match=r"the input of an attention_mask must be \(B, L, \.\.\.\), got \(12,\)"):
        model(tokens[0], attention_mask=mask[0])
