"""MambaLMHeadModel's loss of labels: that of torch on the model's logits, for the parameters' gradients too."""

import pytest
import torch
import torch.nn.functional as F

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    config = MambaConfig(d_model=32, n_layer=2, vocab_size=50, tie_embeddings=request.param)
    return MambaLMHeadModel(config)


@pytest.fixture
def tokens():
    return torch.randint(50, (3, 17))


def plain(model, tokens, labels, last=0, **options):
    logits, labels = model(tokens).logits[:, -last - 1 if last else None :], labels[:, -last if last else None :]
    logits, labels = (logits[:, :-1], labels) if last else (logits[:, :-1], labels[:, 1:])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_loss_and_gradients(model, tokens):
    labels = tokens.clone()
    labels[:, 10] = -100
    found, expected = model(tokens, labels=labels), plain(model, tokens, labels)
    torch.testing.assert_close(found.loss, expected)
    assert found[0] is found.loss and found.logits is None  # trainers take the first
    torch.testing.assert_close(gradients(model, found.loss), gradients(model, expected), atol=1e-6, rtol=1e-4)


def test_options(model, tokens):
    options = {"label_smoothing": 0.1, "ignore_index": 7}
    found = model(tokens, labels=tokens, **options).loss
    torch.testing.assert_close(found, plain(model, tokens, tokens, **options))
    assert model(tokens, labels=tokens, z_loss=0.1).loss > model(tokens, labels=tokens).loss


def test_last_tokens(model, tokens):
    """The last 5 positions predict 4 labels: the last of them has none."""
    found = model(tokens, labels=tokens, num_last_tokens=5).loss
    torch.testing.assert_close(found, plain(model, tokens, tokens, last=4))


def test_batches_that_accumulate(model, tokens):
    """Three batches of one row, each divided by what all have."""
    total = sum(model(row, labels=row, num_items_in_batch=3 * 16).loss for row in tokens.split(1))
    torch.testing.assert_close(total, model(tokens, labels=tokens).loss)


def test_labels_of_another_shape(model, tokens):
    with pytest.raises(ValueError, match=r"labels must be \(B, L\) as input_ids, \(3, 17\), got \(3, 16\)"):
        model(tokens, labels=tokens[:, 1:])
    with pytest.raises(TypeError, match=r"labels must be a torch.Tensor, got list"):
        model(tokens, labels=tokens.tolist())
    with pytest.raises(ValueError, match=r"labels must lie in 0..55, or ignore_index = -100, got 900"):
        model(tokens, labels=torch.full_like(tokens, 900))


def test_a_head_that_is_more_than_its_weight(model, tokens):
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"lm_head must be an nn.Linear without .*, got hooks"):
        model(tokens, labels=tokens)


def test_a_training_run(tokens):
    """The loss falls as far as with all logits, step by step."""
    losses = []
    for loss_of in (lambda model: model(tokens, labels=tokens).loss, lambda model: plain(model, tokens, tokens)):
        torch.manual_seed(0)
        model = MambaLMHeadModel(MambaConfig(d_model=32, n_layer=1, vocab_size=50))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] < 2
