"""CUDA graphs of decoding steps: the same tokens, and what a graph follows."""

import copy
import pickle

import pytest
import torch
from _helpers.small_models import MODELS, make, prompt

from mamba_ssm._torch import autocast_dtype, autocast_without_cache
from mamba_ssm.utils._graphs import _key
from mamba_ssm.utils.generation import (
    DecodingCGCache,
    InferenceParams,
    capture_graph,
    update_graph_cache,
)
from mamba_ssm.utils.reference import plain_torch


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


class Streamer:
    def __init__(self):
        self.parts = []

    def put(self, tokens):
        self.parts.append(tokens)

    def end(self):
        self.parts = torch.stack(self.parts[1:], dim=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "hybrid"])
def test_greedy_steps_feed_themselves(kind, cuda):
    """As by a call of the model for each token: ends of rows, streamers, padding, other vocabularies, other graphs."""
    model, tokens = make(kind, cuda), prompt(3, device=cuda)
    free = model.generate(tokens, 20)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    eos = [int(free[0, 12]), int(free[1, 9]), 58]
    options = [
        {},
        {"eos_token_id": eos[0]},
        {"eos_token_id": eos},
        {"eos_token_id": eos[1:]},
        {"attention_mask": mask},
        {"attention_mask": mask, "eos_token_id": eos[1]},
        {"vocab_size": 11},
        {"max_length": 7},
        {"max_length": 8, "eos_token_id": 58},
    ]
    for option in options * 2:
        option = {"max_length": 20, **option}
        streamer, expected = Streamer(), model.generate(tokens, **option)
        assert torch.equal(model.generate(tokens, cg=True, streamer=streamer, **option), expected)
        assert torch.equal(streamer.parts, expected[:, 6:].cpu())
        alone = {**option, "attention_mask": mask[:1]}
        assert torch.equal(model.generate(tokens[:1], cg=True, **alone), model.generate(tokens[:1], **alone))
        for other in ({"top_k": 5}, {"repetition_penalty": 1.5}, {"teacher_outputs": free[:, :9]}):
            found = []
            for cg in (True, False):
                torch.manual_seed(5)
                found.append(model.generate(tokens, cg=cg, **option, **other))
            assert torch.equal(*found)


@pytest.mark.gpu
def test_a_greedy_step_is_one_launch(cuda):
    model, tokens = make(device=cuda), prompt(device=cuda)
    model.generate(tokens, 40, cg=True)

    def launches(length):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model.generate(tokens, length, cg=True)
            torch.cuda.synchronize()
        return sum(
            event.count for event in profile.key_averages() if event.key.startswith(("cudaLaunch", "cudaGraphL"))
        )

    assert launches(40) - launches(30) == 10


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
