"""The generation loop: every option, and errors."""

import pytest
import torch
from _helpers.decoding import full_forward_tokens
from _helpers.small_models import MODELS, make, prompt

from mamba_ssm.utils.generation import (
    GenerationMixin,
    InferenceParams,
    capture_graph,
    decode,
    update_graph_cache,
)


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_equals_full_forwards(kind, device):
    model, tokens = make(kind, device), prompt(device=device)
    found = model.generate(tokens, max_length=15)
    assert torch.equal(found, full_forward_tokens(model, tokens, 15))
    assert torch.equal(model.generate(tokens[:, :1], max_length=15), full_forward_tokens(model, tokens[:, :1], 15))
    trimmed = model.generate(tokens, max_length=15, vocab_size=20)
    assert torch.equal(trimmed, full_forward_tokens(model, tokens, 15, 20)) and trimmed[:, 6:].max() < 20


@pytest.mark.parametrize("kind", MODELS)
def test_teacher_forced_scores_equal_one_forward(kind, device):
    model, tokens = make(kind, device), prompt(seqlen=14, device=device)
    output = model.generate(
        tokens[:, :5],
        max_length=14,
        teacher_outputs=tokens,
        return_dict_in_generate=True,
        output_scores=True,
        vocab_size=59,
    )
    assert torch.equal(output.sequences, tokens)
    assert len(output.scores) == 9
    with torch.no_grad():
        expected = model(tokens).logits[:, 4:-1, :59]
    torch.testing.assert_close(torch.stack(output.scores, dim=1), expected, rtol=1e-4, atol=1e-4)
    partly = model.generate(tokens[:, :5], max_length=14, teacher_outputs=tokens[:, :9])
    assert torch.equal(partly, full_forward_tokens(model, tokens[:, :9], 14))


def test_sampling_repeats_with_its_seed_and_varies_without(device):
    model, tokens = make(device=device), prompt(device=device)
    options = {"top_k": 20, "top_p": 0.95, "min_p": 0.001, "temperature": 3.0}
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model.generate(tokens, max_length=25, **options))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(runs[0][:, :6], tokens)


def test_repetition_penalty_forbids_what_was_there(device):
    model, tokens = make(device=device), prompt(device=device)
    plain = model.generate(tokens, max_length=30, vocab_size=59)
    assert any(len(set(row)) < 30 for row in plain.tolist()), "this model does not repeat: the test shows nothing"
    # a huge penalty makes seen tokens' logits about zero or hugely negative
    found = model.generate(tokens, max_length=20, vocab_size=59, repetition_penalty=1e6)
    for row, start in zip(found.tolist(), tokens.tolist(), strict=True):
        new = row[6:]
        assert len(set(new)) == len(new) and not set(new) & set(start)
    # a token of the prompt beyond vocab_size is no error
    model.generate(tokens, max_length=9, vocab_size=3, repetition_penalty=1.1)


def test_end_of_sequence(device):
    model, tokens = make(device=device), prompt(3, device=device)
    options = {"max_length": 20, "repetition_penalty": 1e6}  # so that no row repeats a token by itself
    plain = model.generate(tokens, **options)
    for eos in plain[0, 6:].tolist():
        ends = [row.index(eos, 6) + 1 if eos in row[6:] else 20 for row in plain.tolist()]
        if ends[0] < max(ends):  # this row goes on beyond its end
            break
    found = model.generate(tokens, eos_token_id=eos, **options)
    assert ends[0] < max(ends) == found.shape[1]
    for row, free, end in zip(found.tolist(), plain.tolist(), ends, strict=True):
        assert row[:end] == free[:end] and set(row[end:]) <= {eos}
    alone = model.generate(tokens[:1], eos_token_id=eos, **options)
    assert torch.equal(alone, plain[:1, : ends[0]])


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_several_ends_of_sequence(form, device):
    """The rows stop at whichever comes first, and go on with the first of them."""
    model, tokens = make(device=device), prompt(2, device=device)
    plain = model.generate(tokens, max_length=20, repetition_penalty=1e6)
    ends = [plain[0, 12].item(), plain[1, 9].item()]
    found = model.generate(tokens, max_length=20, repetition_penalty=1e6, eos_token_id=form(ends))
    for row, free in zip(found.tolist(), plain.tolist(), strict=True):
        end = next(i for i in range(6, 20) if free[i] in ends) + 1
        assert row[:end] == free[:end] and set(row[end:]) <= {ends[0]}
    one = model.generate(tokens, max_length=20, eos_token_id=ends[0])
    assert torch.equal(model.generate(tokens, max_length=20, eos_token_id=torch.tensor(ends[0])), one)
    for wrong in ([], 1.5, True, "a", [3, None], 10**30):
        with pytest.raises(ValueError, match="eos_token_id must be one or several integers, got"):
            model.generate(tokens, max_length=20, eos_token_id=wrong)


def test_greedy_at_temperature_0():
    """As evaluation harnesses ask for it."""
    model, tokens = make(), prompt()
    assert torch.equal(model.generate(tokens, 9, temperature=0.0), model.generate(tokens, 9))


class Streamer:
    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, tokens):
        assert tokens.device.type == "cpu"
        self.parts.append(tokens)

    def end(self):
        self.ended = True


def test_streamer_and_timing(device, capsys):
    model, tokens = make(device=device), prompt(1, device=device)
    streamer = Streamer()
    found = model.generate(tokens, max_length=11, streamer=streamer, enable_timing=True)
    assert streamer.ended and torch.equal(streamer.parts[0], tokens.cpu())
    assert [part.shape for part in streamer.parts[1:]] == [(1,)] * 5
    assert torch.cat([streamer.parts[0][0], *streamer.parts[1:]]).tolist() == found[0].tolist()
    assert "Prompt processing + decoding time: " in capsys.readouterr().out


def test_what_is_returned():
    model, tokens = make(), prompt()
    assert isinstance(model.generate(tokens, 8), torch.Tensor)
    output = model.generate(tokens, 8, return_dict_in_generate=True)
    assert output.scores is None and output.sequences.shape == (2, 8)
    assert model.generate(tokens[:0], 8).shape == (0, 8)
    assert torch.equal(model.generate(tokens.int(), 8), output.sequences)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"max_length": 6}, "must exceed its 6 tokens, got 6"),
        ({"top_k": -1}, "top_k must be an integer, 0 .off. or more, got -1"),
        ({"top_p": 1.5}, "top_p must be from 0 .off. to 1, got 1.5"),
        ({"min_p": -0.5}, "min_p must be from 0 .off. to 1, got -0.5"),
        ({"top_k": 1.5}, "top_k must be an integer, 0 .off. or more, got 1.5"),
        ({"temperature": "1"}, "temperature must be positive .*, got '1'"),
        ({"top_k": None}, "top_k must be an integer, 0 .off. or more, got None"),
        ({"max_length": 9.0}, "max_length must be a positive integer, got 9.0"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"vocab_size": -3}, "vocab_size must be a positive integer, got -3"),
        ({"temperature": 0.0, "top_k": 2}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"at least one token, got int64 \(2, 0\)"),
        ({"input_ids": torch.zeros(6, dtype=torch.long)}, r"must be int64 \(B, L\) .* got int64 \(6,\)"),
        ({"input_ids": torch.zeros(2, 6)}, r"got float32 \(2, 6\)"),
        (
            {"input_ids": torch.full((2, 6), 64)},
            "from 0 to 58, since the vocabulary has 59, got 64 in row 0",
        ),
        (
            {"input_ids": torch.full((2, 6), -1)},
            "input_ids must hold tokens from 0 to 58.* got -1 in row 0",
        ),
        (
            {"teacher_outputs": torch.full((2, 9), 70)},
            "teacher_outputs must hold tokens.* got 70 in row 0",
        ),
        ({"teacher_outputs": torch.zeros(3, 9, dtype=torch.long)}, "must have input_ids' 2 rows, got 3"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make().generate(**{"input_ids": prompt(), "max_length": 9, **options})


@pytest.mark.parametrize(
    "options,cure",
    [
        ({"topk": 5}, "did you mean 'top_k'?"),
        ({"temprature": 1.0}, "did you mean 'temperature'?"),
        ({"q": 1}, "takes attention_mask, cg,"),
    ],
    ids=str,
)
def test_arguments_that_generate_does_not_have(options, cure):
    with pytest.raises(TypeError) as caught:
        make().generate(prompt(), 9, **options)
    text = str(caught.value)
    assert text.startswith(f"generate: there is no argument {next(iter(options))!r}: ") and cure in text


def test_tokens_that_are_no_tensor():
    with pytest.raises(TypeError, match=r"input_ids must be an int64 tensor \(B, L\), got list"):
        make().generate([[1, 2]], max_length=9)


def test_cuda_graphs_need_a_gpu():
    model = make()
    with pytest.warns(UserWarning, match="cg=True needs the model on a CUDA device, it is on cpu") as seen:
        tokens = model.generate(prompt(), 9, cg=True)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="cg=True needs the model on a CUDA device") as seen:
        decode(prompt(), model, 9, cg=True)
    assert seen[0].filename == __file__
    assert torch.equal(tokens, model.generate(prompt(), 9))
    with pytest.raises(RuntimeError, match="cg=True needs the model on a CUDA device, it is on cpu; use cg=False"):
        update_graph_cache(model, None, 1, 2, 9)
    with pytest.raises(RuntimeError, match="capture_graph needs the model on a CUDA device, it is on cpu"):
        capture_graph(model, InferenceParams(9, 1), 1, 9)


@pytest.mark.gpu
def test_a_step_decodes_one_token(cuda):
    with pytest.raises(ValueError, match=r"decoding_seqlens=\(1,\), got \(1, 2\)"):
        update_graph_cache(make(device=cuda), None, 1, 2, 9, decoding_seqlens=(1, 2))


def test_mixin_needs_a_cache():
    class Model(GenerationMixin):
        pass

    with pytest.raises(NotImplementedError, match="Model must define allocate_inference_cache"):
        Model().allocate_inference_cache(1, 2)


def test_inference_params():
    params = InferenceParams(10, 2, seqlen_offset=5, lengths_per_sample=torch.ones(2, dtype=torch.int32))
    params.reset(20, 3)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (20, 3, 0)
    assert params.lengths_per_sample.tolist() == [0, 0]
