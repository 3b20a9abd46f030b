"""Prompts of different lengths in one batch are continued as each alone."""

import pytest
import torch

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

SIZES = {"d_state": 16, "headdim": 8}
ATTENTION = {
    "attn_layer_idx": [1],
    "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4, "d_conv": 4},
}
MODELS = {
    "mamba": {},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", **SIZES}},
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", **SIZES}},
    "mimo": {"ssm_cfg": {"layer": "Mamba3", **SIZES, "is_mimo": True, "is_outproj_norm": True}},
    "hybrid": {"ssm_cfg": {"layer": "Mamba2", **SIZES}, **ATTENTION},
    "hybrid of mamba3": {"ssm_cfg": {"layer": "Mamba3", **SIZES}, "d_intermediate": 24, **ATTENTION},
}
LENGTHS, PROMPT, NEW = (9, 2, 1, 6), 9, 8


def make(kind, device="cpu"):
    torch.manual_seed(0)
    config = MambaConfig(**{"d_model": 32, "n_layer": 3, "vocab_size": 59, **MODELS[kind]})
    # larger than a trained model's: the likeliest token must lead by more than rounding
    return MambaLMHeadModel(config, initializer_cfg={"initializer_range": 0.5}, device=device)


def prompts(side, device="cpu"):
    """Random tokens at padding too: whatever is there, it must not matter."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 59, (len(LENGTHS), PROMPT), generator=generator)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(LENGTHS):
        start = {"left": PROMPT - length, "right": 0, "both": (PROMPT - length) // 2}[side]
        mask[row, start : start + length] = 1
    return tokens.to(device), mask.to(device)


def check_rows(model, side, device, cg=False, **options):
    """Tokens, and the logits that they were chosen by, which are larger than 10."""
    tokens, mask = prompts(side, device)
    options |= {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(tokens, PROMPT + NEW, attention_mask=mask, cg=cg, **options)
    assert torch.equal(found.sequences[:, :PROMPT], tokens)
    for row, length in enumerate(LENGTHS):
        alone = model.generate(tokens[row][mask[row] == 1][None], length + NEW, **options)
        assert torch.equal(found.sequences[row, PROMPT:], alone.sequences[0, length:])
        for scores, expected in zip(found.scores, alone.scores, strict=True):
            torch.testing.assert_close(scores[row], expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_continued_as_if_alone(kind, device):
    model = make(kind, device)
    for side in ("left", "right", "both"):
        check_rows(model, side, device)


def test_options(device):
    model = make("hybrid", device)
    check_rows(model, "left", device, repetition_penalty=1.5, vocab_size=40)
    tokens, mask = prompts("left", device)
    stop = model.generate(tokens, PROMPT + NEW, attention_mask=mask)[:, PROMPT + 2].tolist()
    check_ends = model.generate(tokens, PROMPT + NEW, attention_mask=mask, eos_token_id=stop)
    assert check_ends.shape[1] <= PROMPT + 3
    teacher = torch.randint(0, 59, (len(LENGTHS), PROMPT + 4), device=device)
    forced = model.generate(tokens, PROMPT + NEW, attention_mask=mask, teacher_outputs=teacher)
    assert torch.equal(forced[:, PROMPT : PROMPT + 4], teacher[:, PROMPT:])
    torch.manual_seed(4)
    drawn = model.generate(tokens, PROMPT + NEW, attention_mask=mask, top_k=8, top_p=0.9, temperature=2.0)
    torch.manual_seed(4)
    moved, behind = prompts("right", device)
    moved[behind == 1] = tokens[mask == 1]
    again = model.generate(moved, PROMPT + NEW, attention_mask=behind, top_k=8, top_p=0.9, temperature=2.0)
    assert torch.equal(drawn[:, PROMPT:], again[:, PROMPT:])


def test_a_mask_of_ones():
    model, (tokens, mask) = make("hybrid"), prompts("left")
    found = model.generate(tokens, PROMPT + NEW, attention_mask=torch.ones_like(mask))
    assert torch.equal(found, model.generate(tokens, PROMPT + NEW))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask.index_fill(0, torch.tensor([2]), 0), "a token in each row to continue, got none in row 2"),
        (lambda mask: mask.index_fill(1, torch.tensor([5]), 0), "padding between them in row 0 at step 5"),
        (lambda mask: mask * 3, "1 for a real step and 0 for padding, got 3"),
        (lambda mask: mask[:, 1:], r"shape \(B, L\) = \(4, 9\) like the input, got \(4, 8\)"),
        (lambda mask: mask.float(), "of bool or integers"),
        (lambda mask: mask.tolist(), "be a torch.Tensor, got list"),
    ],
)
def test_wrong_masks(change, message):
    tokens, mask = prompts("left")
    with pytest.raises((TypeError, ValueError), match=f"generate: attention_mask must .*{message}"):
        make("mamba").generate(tokens, PROMPT + NEW, attention_mask=change(mask))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_graphs(kind, cuda):
    model = make(kind, cuda)
    for side in ("left", "right"):
        check_rows(model, side, cuda, cg=True)
    tokens, _ = prompts("left", cuda)  # the graph serves calls without padding too
    assert torch.equal(model.generate(tokens, PROMPT + NEW, cg=True), model.generate(tokens, PROMPT + NEW))
