"""generate and a padded vocabulary: rows of the embedding that are no tokens."""

import pytest
import torch
import torch.nn as nn
from _helpers.decoding import full_forward_tokens

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.utils.generation import decode


@pytest.mark.parametrize("token", [50, 55, 56, -1])
@pytest.mark.parametrize("name", ["input_ids", "teacher_outputs"])
def test_tokens_beyond_the_vocabulary(name, token, device):
    """Those that pad the embedding, too."""
    model = padded_model(device)
    tokens = torch.zeros(2, 4, dtype=torch.long, device=device)
    tokens[1, 2] = token
    given = {"input_ids": torch.zeros_like(tokens[:, :2]), name: tokens}
    message = f"generate: {name} must hold tokens from 0 to 49, since the vocabulary has 50, got {token} in row 1 at "
    with pytest.raises(ValueError, match=message + "position 2"):
        model.generate(**given, max_length=6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 0},
        {"top_k": 53},
        {"top_k": 3},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 0, "min_p": 0.1},
        {"top_k": 0, "temperature": 100.0},
        {"repetition_penalty": 3.0},
        {"cg": True},
    ],
    ids=str,
)
def test_padding_is_never_drawn(options, device):
    """Though its rows of the embedding give the largest logits, which forward returns at their padded width."""
    if options.get("cg") and device == "cpu":
        pytest.skip("a CUDA graph needs a GPU")
    model = padded_model(device)
    tokens = torch.arange(6, device=device).view(2, 3)
    logits = model(tokens).logits
    assert logits.shape == (2, 3, 56) and (logits.argmax(-1) >= 50).all()
    output = model.generate(tokens, 20, return_dict_in_generate=True, output_scores=True, **options)
    assert output.sequences.max() < 50 and {score.shape for score in output.scores} == {(2, 50)}
    if not options:
        assert torch.equal(output.sequences, full_forward_tokens(model, tokens, 20, 50))


def test_rows_that_were_trained_are_taken_in(device):
    """Special tokens in rows that pad the embedding: vocab_size says that they are tokens."""
    model = padded_model(device)
    tokens = torch.tensor([[53, 1]], device=device)
    with pytest.raises(ValueError, match=r"got 53 in row 0 at position 0; if rows that pad the embedding were trained"):
        model.generate(tokens, 4)
    sequences = model.generate(tokens, 9, vocab_size=54)
    assert sequences[:, 2:].min() >= 50 and sequences.max() < 54
    with pytest.raises(ValueError, match=r"tokens from 0 to 55, .* got 56"):
        model.generate(tokens + 3, 4, vocab_size=60)


def padded_model(device):
    """A vocabulary of 50 in an embedding of 56 rows, the last 6 of which are what the model likes best."""
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=50, tie_embeddings=False), device=device)
    model.backbone.norm_f.bias = nn.Parameter(torch.full((16,), 5.0, device=device))
    with torch.no_grad():
        model.lm_head.weight[50:] = 5.0
    return model


def test_the_vocabulary_of_a_model_without_a_config(device):
    class Wrapped(nn.Module):
        def __init__(self, model, vocab_size=None):
            super().__init__()
            self.model, self.vocab_size = model, vocab_size

        def forward(self, *arguments, **options):
            return self.model(*arguments, **options)

    model = padded_model(device)
    tokens = torch.zeros(1, 3, dtype=torch.long, device=device)
    assert decode(tokens, Wrapped(model), 8).sequences[0, 3:].min() >= 50
    assert decode(tokens, Wrapped(model), 8, vocab_size=50).sequences.max() < 50
    assert decode(tokens, Wrapped(model, 50), 8).sequences.max() < 50
