"""Decoding on the CPU by recorded steps: bit for bit what the model's modules compute, whatever changes between tokens.

A model with a hook, which does nothing, decodes by its modules: each test has two copies of a model and compares them.
"""

import copy
import gc
import multiprocessing
import pickle
import sys
import threading
import weakref

import pytest
import torch
from _helpers.chat import LAYERS, PROMPT, VOCABULARY, Chat, check_same, make, mixer

from mamba_ssm import MambaLMHeadModel, quantize
from mamba_ssm._torch.private import MODES_KEEP_INFERENCE
from mamba_ssm.models import _decoding
from mamba_ssm.utils.reference import plain_torch


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request):
    if request.param == "inference_mode" and not MODES_KEEP_INFERENCE:
        pytest.skip("this torch records nothing in inference mode")
    with getattr(torch, request.param)():
        yield


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_steps_are_those_of_the_modules(kind, dtype, batch, grad_mode, replays):
    chat, other = (Chat(model, batch) for model in make(kind, dtype))
    check_same(chat, other, 8)
    assert len(replays) == 6, "the first step is called, the second recorded"


@pytest.mark.skipif(not MODES_KEEP_INFERENCE, reason="this torch records nothing in inference mode")
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "temperature": 0.8}, {"repetition_penalty": 1.3}], ids=str)
def test_generate(options, replays):
    written = []
    for model in make():
        torch.manual_seed(3)
        prompt = torch.arange(6).view(2, 3)
        output = model.generate(prompt, 20, output_scores=True, return_dict_in_generate=True, **options)
        written.append((output.sequences, torch.stack(output.scores)))
    assert all(map(torch.equal, *written))
    assert len(replays) == 14


class Doubled(MambaLMHeadModel):
    """Changes its weights in each call."""

    def forward(self, *args, **kwargs):
        for layer in self.backbone.layers:
            layer.mixer.out_proj.weight = torch.nn.Parameter(layer.mixer.out_proj.weight * 1.05)
        return super().forward(*args, **kwargs)


class Streamer:
    def put(self, tokens):
        pass

    def end(self):
        pass


@pytest.mark.skipif(not MODES_KEEP_INFERENCE, reason="this torch records nothing in inference mode")
def test_generate_compares_once_where_nobody_comes_between(replays, monkeypatch):
    compared = []
    holds = _decoding.Snapshot.holds
    monkeypatch.setattr(_decoding.Snapshot, "holds", lambda *given: compared.append(1) or holds(*given))
    model, other = make()
    prompt = torch.arange(6).view(2, 3)

    def counts(streamer=None):
        replays.clear(), compared.clear()
        assert torch.equal(model.generate(prompt, 20, streamer=streamer), other.generate(prompt, 20))
        return len(replays), len(compared)

    once = counts()
    assert once[0] == 14 and once[1] <= 4
    assert counts(Streamer())[1] >= once[1] + 13
    handle = model.register_forward_hook(lambda *_: None)
    assert counts()[1] >= once[1] + 13
    handle.remove()
    assert counts() == once
    for changed in (model, other):
        changed.__class__ = Doubled
    assert counts()[0] == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_look_up_in_an_int8_embedding_is_recorded(dtype, batch, replays):
    with torch.no_grad():
        chat, other = (Chat(quantize(model), batch) for model in make("mamba2", dtype))
        check_same(chat, other, 8)
        assert len(replays) == 6
        before = copy.deepcopy(chat.states())
        for token in (VOCABULARY, -1):
            with pytest.raises(IndexError, match=f"indices must be in 0..{VOCABULARY - 1}, got {token}"):
                chat.model(torch.full((batch, 1), token), inference_params=chat.params)
        assert all(map(torch.equal, before, chat.states()))
        chat.tokens, other.tokens = chat.tokens.int(), other.tokens.int()
        check_same(chat, other)
        assert len(replays) == 6 + 2 + 3
        for wrong, error in ((torch.ones(batch, 1), ValueError), (torch.ones(batch, 1, dtype=torch.bool), ValueError)):
            with pytest.raises(error, match="input_ids must be int64"):
                chat.model(wrong, inference_params=chat.params)
        check_same(chat, other)


def test_another_number_of_threads(replays):
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            chat, other = map(Chat, make())
            for count in (1, 2, 1):
                torch.set_num_threads(count)
                check_same(chat, other)
    finally:
        torch.set_num_threads(threads)
    assert len(replays) == 6


def test_a_global_hook_is_called():
    seen = []
    with torch.no_grad():
        chat = Chat(make()[0])
        chat.steps()
        with_hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
        try:
            chat.steps(1)
        finally:
            with_hook.remove()
    assert "Block" in {kind.__name__ for kind in seen}


# ---- what else may go on ---------------------------------------------------------------------------------------------


class Counting(torch.overrides.TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        plain_torch,
        Counting,
    ],
    ids=["grad", "autocast", "profiler", "plain_torch", "function mode"],
)
def test_what_watches_sees_the_modules(context, replays):
    with torch.no_grad():
        chat, other = map(Chat, make())
        check_same(chat, other)
        with context():
            assert torch.equal(chat.steps(), other.steps())
        assert len(replays) == 2
        check_same(chat, other)
        assert len(replays) == 6, "nothing has changed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gated_mlp_is_recorded(dtype, replays):
    with torch.no_grad():
        check_same(*(Chat(model, 2) for model in make("mamba3", dtype, d_intermediate=64)), 8)
    assert len(replays) == 6


def test_attention_is_called(replays):
    attention = {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4, "causal": True}, "d_intermediate": 64}
    with torch.no_grad():
        chat, other = map(Chat, make(**attention))
        assert torch.equal(chat.steps(8), other.steps(8))
    assert not replays


def test_a_token_out_of_the_vocabulary_is_an_error():
    with torch.no_grad():
        chat = Chat(make()[0])
        chat.steps()
        before = copy.deepcopy(chat.states())
        for token in (VOCABULARY, -1):
            with pytest.raises(IndexError, match="out of range"):
                chat.model(torch.tensor([[token]]), inference_params=chat.params)
        assert all(map(torch.equal, before, chat.states()))


def test_a_wrong_batch_is_the_modules_error():
    with torch.no_grad():
        chat = Chat(make()[0])
        chat.steps()
        with pytest.raises(ValueError, match="a batch of 1, got a batch of 2"):
            chat.model(torch.zeros(2, 1, dtype=torch.long), inference_params=chat.params)


def test_an_object_without_weak_references_holds_states_too(replays):
    class Cache:
        __slots__ = ("key_value_memory_dict", "seqlen_offset")

    with torch.no_grad():
        model, other = make()
        expected = Chat(other).steps()
        cache, chat = Cache(), Chat(model)
        cache.key_value_memory_dict, cache.seqlen_offset = chat.params.key_value_memory_dict, PROMPT
        chat.params = cache
        assert torch.equal(chat.steps(), expected)
    assert not replays


def test_versions_of_states_rise():
    with torch.no_grad():
        chat = Chat(make()[0])
        for _ in range(4):
            versions = [state._version for state in chat.states()]
            chat.steps(1)
            assert all(state._version > version for state, version in zip(chat.states(), versions, strict=True))


def test_threads_with_a_model_and_caches_of_their_own(replays):
    model, other = make()
    expected = {}
    with torch.no_grad():
        for batch in (1, 2, 3):
            expected[batch] = Chat(other, batch).steps(20)
    found = {}

    def work(batch):
        with torch.no_grad():
            found[batch] = Chat(model, batch).steps(20)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[batch], expected[batch]) for batch in expected)
    assert len(replays) == 3 * 18


def test_copies_and_pickles_of_what_is_decoding(replays):
    with torch.no_grad():
        chat, other = map(Chat, make())
        check_same(chat, other)
        twin, saved = copy.deepcopy(chat), pickle.loads(pickle.dumps(chat.model))
        mixer(chat.model).in_proj.weight.zero_()
        mixer(other.model).in_proj.weight.zero_()
        check_same(chat, other)
        expected = Chat(make()[1]).steps(8)
        assert torch.equal(twin.steps(), expected[4:])
        assert torch.equal(Chat(saved).steps(8), expected)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_goes_on():
    with torch.no_grad():
        chat, other = map(Chat, make())
        check_same(chat, other)
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # torch's own threads do not survive a fork
        try:
            check_same(chat, other)
            child = context.Process(target=lambda: results.put(chat.steps().float().tolist()))
            child.start()
            expected = other.steps().float().tolist()
            child.join(60)
            assert child.exitcode == 0 and results.get() == expected
            assert chat.steps().float().tolist() == expected
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("kept", ["params", "model", "neither"])
def test_memory_goes_with_the_model_or_the_cache(kept):
    with torch.no_grad():
        chat = Chat(make()[0])
        chat.steps()
    key = id(chat.params)
    assert _decoding._SESSIONS[key].sequence
    weight = weakref.ref(mixer(chat.model).in_proj.weight)
    state = weakref.ref(chat.states()[0])
    alive = {"params": chat.params, "model": chat.model}.get(kept)
    del chat
    gc.collect()
    assert key not in _decoding._SESSIONS
    assert (weight() is None) == (kept != "model") and (state() is None) == (kept != "params")
    del alive
