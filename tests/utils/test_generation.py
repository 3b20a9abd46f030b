"""The generation loop: every option, errors, and CUDA graphs that give the same tokens."""

import copy
import pickle

import pytest
import torch
from _helpers.decoding import full_forward_tokens

from mamba_ssm._torch import autocast_dtype, autocast_without_cache
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.utils._graphs import _key
from mamba_ssm.utils.generation import (
    DecodingCGCache,
    GenerationMixin,
    InferenceParams,
    capture_graph,
    decode,
    update_graph_cache,
)
from mamba_ssm.utils.reference import plain_torch

ATTENTION = {
    "attn_layer_idx": [1],
    "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4, "d_conv": 4},
}
MODELS = {
    "mamba": {},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "chunk_size": 16}},
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 8}},
    "mimo": {"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 8, "is_mimo": True, "is_outproj_norm": True}},
    "hybrid": {"ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "chunk_size": 16}, **ATTENTION},
    "hybrid of mamba3": {"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 8}, **ATTENTION},
}


def make(kind="mamba", device="cpu", dtype=None):
    torch.manual_seed(0)
    config = MambaConfig(d_model=32, n_layer=3, vocab_size=59, **MODELS[kind])
    # larger than a trained model's: the likeliest token must lead by more than rounding
    return MambaLMHeadModel(config, initializer_cfg={"initializer_range": 0.5}, device=device, dtype=dtype)


def prompt(batch=2, seqlen=6, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 59, (batch, seqlen), generator=generator).to(device)


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


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind,dtype",
    # a graph's attention masks the whole cache, which rounds otherwise: in bfloat16 another token may come first
    [
        (kind, dtype)
        for kind in MODELS
        for dtype in (torch.float32, torch.bfloat16)
        if "hybrid" not in kind or dtype == torch.float32
    ],
    ids=str,
)
def test_graphs_give_the_same_tokens(kind, dtype, cuda):
    model = make(kind, cuda, dtype)
    for batch, seqlen, max_length in ((2, 6, 20), (1, 3, 30), (3, 9, 12), (2, 1, 20), (2, 6, 20)):
        tokens = prompt(batch, seqlen, cuda)
        assert torch.equal(model.generate(tokens, max_length, cg=True), model.generate(tokens, max_length))
    cache = model._decoding_cache
    model.generate(prompt(2, 6, cuda), 20, cg=True)
    assert model._decoding_cache is cache, "an equal call captured again"


@pytest.mark.gpu
def test_a_step_captured_by_hand(cuda):
    """As upstream's capture_graph is used: the caller holds the states."""
    model, tokens = make(device=cuda), prompt(2, 6, cuda)
    params = InferenceParams(max_seqlen=9, max_batch_size=2)
    params.key_value_memory_dict = model.allocate_inference_cache(2, 9)
    with pytest.raises(ValueError, match=r"needs inference_params\.lengths_per_sample, a tensor"):
        capture_graph(model, params, 2, 9)
    params.lengths_per_sample = torch.zeros(2, dtype=torch.int32, device=cuda)
    with torch.inference_mode():
        run = capture_graph(model, params, 2, 9)
        params.reset(9, 2)
        token = model(tokens, inference_params=params, num_last_tokens=1).logits.argmax(-1)
        expected = [token]
        for offset in (6, 7):
            logits = run(token, torch.full_like(token, offset), offset)
            token = logits.argmax(-1)
            expected.append(token)
    assert torch.equal(model.generate(tokens, 9), torch.cat([tokens, *expected], dim=1))


@pytest.mark.gpu
def test_graphs_follow_hooks_and_replaced_modules(cuda):
    model, tokens = make(device=cuda), prompt(device=cuda)
    plain = model.generate(tokens, 20, cg=True)
    norm = model.backbone.norm_f
    handle = norm.register_forward_hook(lambda module, inputs, output: -output)
    hooked = model.generate(tokens, 20, cg=True)
    assert torch.equal(hooked, model.generate(tokens, 20)) and not torch.equal(hooked, plain)
    handle.remove()
    assert torch.equal(model.generate(tokens, 20, cg=True), plain)

    class Negated(type(norm)):
        def forward(self, x):
            return -super().forward(x)

    norm.__class__ = Negated  # the same parameters
    assert torch.equal(model.generate(tokens, 20, cg=True), hooked)


def test_what_a_graph_depends_on():
    model = make()
    keys = [_key(model, None)]
    norm = model.backbone.norm_f
    handle = norm.register_forward_pre_hook(lambda module, inputs: None)
    keys.append(_key(model, None))
    handle.remove()
    assert _key(model, None) == keys[0]
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(_key(model, None))
    assert _key(model, None) == keys[0]
    model.eval()
    keys.append(_key(model, None))
    norm.register_buffer("scale", torch.ones(32))
    keys.append(_key(model, None))
    norm.scale = torch.ones(32)
    keys.append(_key(model, None))
    norm.__class__ = type("Replaced", (type(norm),), {})
    keys.append(_key(model, None))
    model.bfloat16()
    keys.append(_key(model, None))
    assert len(set(keys)) == len(keys) == 8


def test_a_graph_holds_nothing_of_autocasts_cache():
    weight = torch.ones(1)
    with autocast_without_cache(weight):
        assert torch.is_autocast_cache_enabled()  # autocast is off: nothing to do
    with torch.autocast("cpu", torch.bfloat16):
        with autocast_without_cache(weight):
            assert autocast_dtype(weight) == torch.bfloat16 and not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()


@pytest.mark.gpu
def test_graphs_follow_the_weights(cuda):
    """Changed in place: the same graph. Moved elsewhere: another one, not memory that is someone else's now."""
    model, tokens = make(device=cuda), prompt(device=cuda)
    model.generate(tokens, 20, cg=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    assert torch.equal(model.generate(tokens, 20, cg=True), model.generate(tokens, 20))
    model.cpu().to(cuda)
    torch.cuda.empty_cache()
    assert torch.equal(model.generate(tokens, 20, cg=True), model.generate(tokens, 20))
    model.bfloat16()
    assert torch.equal(model.generate(tokens, 20, cg=True), model.generate(tokens, 20))


@pytest.mark.gpu
def test_graphs_hold_kernels_only(cuda):
    model, tokens = make(device=cuda), prompt(device=cuda)
    model.generate(tokens, 12, cg=True)
    with plain_torch(), pytest.raises(RuntimeError, match=r"cg=True captures kernels.*use cg=False"):
        model.generate(tokens, 12, cg=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_graphs_under_autocast(kind, cuda):
    """What autocast casts is cast within the graph: its own copies are gone when it is left."""
    model, tokens = make(kind, cuda), prompt(device=cuda)

    def scores(cg):
        with torch.autocast("cuda", torch.bfloat16):
            teacher = prompt(2, 20, cuda)  # the same tokens, whatever rounding says
            out = model.generate(
                tokens, 20, cg=cg, teacher_outputs=teacher, output_scores=True, return_dict_in_generate=True
            )
        return torch.stack(out.scores).float()

    plain = model.generate(tokens, 20, cg=True)
    first = model._decoding_cache
    graphed, expected = scores(True), scores(False)
    torch.testing.assert_close(graphed, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert model._decoding_cache is not first, "float32's graph ran under autocast"
    fill = torch.full((1 << 24,), float("nan"), device=cuda)  # where the casts may have been
    assert torch.equal(scores(True), graphed)
    del fill
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    assert torch.equal(scores(True)[0], scores(False)[0])  # the prompt, without a graph
    torch.testing.assert_close(scores(True), scores(False), rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert not torch.allclose(scores(True), graphed, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1.25)
    assert torch.equal(model.generate(tokens, 20, cg=True), plain)


@pytest.mark.gpu
def test_graphs_with_every_option(cuda):
    model, tokens = make("hybrid", cuda), prompt(device=cuda)
    options = {"top_k": 8, "top_p": 0.9, "temperature": 2.0, "repetition_penalty": 1.2, "vocab_size": 59}
    runs = []
    for cg in (True, False):
        torch.manual_seed(5)
        runs.append(model.generate(tokens, 30, cg=cg, return_dict_in_generate=True, output_scores=True, **options))
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    torch.testing.assert_close(runs[0].scores, runs[1].scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_model_lack_its_graphs(copied):
    model, tokens = make(), prompt()
    model._decoding_cache = cache = object.__new__(DecodingCGCache)  # its __init__ needs a GPU
    cache.run = lambda tokens, offset: None  # can be copied, but not pickled
    other = copied(model)
    assert other._decoding_cache is None
    assert model._decoding_cache is cache
    assert torch.equal(other.generate(tokens, 8), model.generate(tokens, 8))


@pytest.mark.gpu
def test_a_model_with_a_graph_can_be_copied(cuda):
    model, tokens = make(device=cuda), prompt(device=cuda)
    expected = model.generate(tokens, 12, cg=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._decoding_cache is None
        assert torch.equal(other.generate(tokens, 12, cg=True), expected)
    assert update_graph_cache(model, model._decoding_cache, 2, 6, 12) is model._decoding_cache
