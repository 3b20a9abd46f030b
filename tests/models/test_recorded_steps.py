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
from torch.nn.utils import parametrize, prune

from mamba_ssm import MambaLMHeadModel
from mamba_ssm._native.sequences import Sequence
from mamba_ssm._torch.private import MODES_KEEP_INFERENCE
from mamba_ssm.models import _decoding
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.reference import plain_torch

LAYERS = {
    "mamba": {"layer": "Mamba1"},
    "mamba2": {"layer": "Mamba2", "headdim": 16, "d_state": 16},
    "mamba3": {"layer": "Mamba3", "headdim": 16, "d_state": 16},
    "mimo": {"layer": "Mamba3", "headdim": 16, "d_state": 16, "is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
}
VOCABULARY = 64
PROMPT = 5


def make(kind="mamba2", dtype=torch.bfloat16, **options):
    """(a model that may be recorded, the same with a hook)."""
    torch.manual_seed(0)
    options = {"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY, "ssm_cfg": LAYERS[kind], **options}
    model = MambaLMHeadModel(MambaConfig(**options), dtype=dtype).eval()
    other = copy.deepcopy(model)
    other.backbone.layers[0].register_forward_hook(lambda *_: None)
    return model, other


class Chat:
    """A model that takes one token after the other."""

    def __init__(self, model, batch=1):
        self.model, self.batch = model, batch
        self.params = InferenceParams(max_seqlen=100, max_batch_size=batch)
        self.tokens = torch.randint(VOCABULARY, (batch, 100), generator=torch.Generator().manual_seed(1))
        self.call(PROMPT)

    def call(self, count):
        offset = self.params.seqlen_offset
        tokens = self.tokens[:, offset : offset + count]
        logits = self.model(tokens, inference_params=self.params, num_last_tokens=1).logits
        self.params.seqlen_offset += count
        return logits

    def steps(self, count=4):
        return torch.stack([self.call(1) for _ in range(count)])

    def states(self):
        return [state for states in self.params.key_value_memory_dict.values() for state in states]


@pytest.fixture
def replays(monkeypatch):
    """How often a recorded step was run."""
    found = []
    monkeypatch.setattr(Sequence, "run", lambda *given, run=Sequence.run: found.append(1) or run(*given))
    return found


@pytest.fixture(params=["no_grad", "inference_mode"])
def grad_mode(request):
    if request.param == "inference_mode" and not MODES_KEEP_INFERENCE:
        pytest.skip("this torch records nothing in inference mode")
    with getattr(torch, request.param)():
        yield


def check_same(chat, other, count=4):
    assert torch.equal(chat.steps(count), other.steps(count))
    assert all(map(torch.equal, chat.states(), other.states()))


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


# ---- what may change between two tokens ------------------------------------------------------------------------------


def mixer(model):
    return model.backbone.layers[1].mixer


def other_weights(chat):
    state = {name: tensor * 1.5 for name, tensor in chat.model.state_dict().items()}
    chat.model.load_state_dict(state)


def moved_weights(chat):
    for parameter in chat.model.parameters():
        parameter.data = parameter.data * 1.5


def assigned_weights(chat):
    state = {name: tensor * 1.5 for name, tensor in chat.model.state_dict().items()}
    chat.model.load_state_dict(state, assign=True)


def new_parameter(chat):
    mixer(chat.model).out_proj.weight = torch.nn.Parameter(mixer(chat.model).out_proj.weight * 2)


def transposed_view(chat):
    weight = chat.model.backbone.layers[1].mixer.in_proj.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def fewer_rows(chat):
    chat.model.lm_head.weight = torch.nn.Parameter(chat.model.lm_head.weight[:40])


def fewer_rows_of_the_same_parameter(chat):
    chat.model.lm_head.weight.data = chat.model.lm_head.weight.data[:40]


def new_module(chat):
    width = mixer(chat.model).out_proj
    torch.manual_seed(5)
    mixer(chat.model).out_proj = torch.nn.Linear(width.in_features, width.out_features, dtype=torch.bfloat16)


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * 2


def adapter(chat):
    mixer(chat.model).in_proj = Adapter(mixer(chat.model).in_proj)


def other_head(chat):
    chat.model.lm_head = Adapter(chat.model.lm_head)


def hook_that_doubles(chat):
    mixer(chat.model).register_forward_hook(lambda module, given, result: result * 2)


def hooks_in_a_new_dict(chat):
    """The hooks' dict may be another object, in which one is missed later."""
    own = mixer(chat.model)
    own._forward_hooks = type(own._forward_hooks)()
    chat.steps(2)
    own.register_forward_hook(lambda module, given, result: result * 2)


def own_forward(chat):
    layer = mixer(chat.model).in_proj
    layer.forward = lambda x: torch.nn.Linear.forward(layer, x) * 2


def parametrization(chat):
    parametrize.register_parametrization(mixer(chat.model).in_proj, "weight", torch.nn.Softmax(dim=0))


def pruning(chat):
    prune.l1_unstructured(mixer(chat.model).in_proj, "weight", 0.5)


def other_epsilon(chat):
    chat.model.backbone.norm_f.eps = 1.0


def other_limit(chat):
    mixer(chat.model).dt_limit = (0.1, 0.2)


def float16(chat):
    chat.model.to(torch.float16)


def no_gradients_wanted(chat):
    chat.model.requires_grad_(False)


def untied(chat):
    chat.model.backbone.embedding.weight = torch.nn.Parameter(chat.model.backbone.embedding.weight * 2)


def other_states(chat):
    cache = chat.params.key_value_memory_dict
    for layer, states in cache.items():
        cache[layer] = tuple(state.clone() * 2 for state in states)


def states_in_place(chat):
    for state in chat.states():
        state.mul_(0.5)


def new_cache(chat):
    chat.params.key_value_memory_dict = chat.model.allocate_inference_cache(1, 100)


def states_of_other_layers(chat):
    cache = chat.params.key_value_memory_dict
    first, second = cache[0], cache[1]
    cache.clear()
    cache[1], cache[0] = first, second


def start_again(chat):
    chat.params.reset(100, 1)
    chat.call(3)


def several_tokens(chat):
    chat.call(3)


def layers_swapped(chat):
    layers = chat.model.backbone.layers
    layers[0].mixer, layers[1].mixer = layers[1].mixer, layers[0].mixer


def layer_removed(chat):
    del chat.model.backbone.layers[1]


CHANGES = [
    other_weights,
    moved_weights,
    assigned_weights,
    new_parameter,
    transposed_view,
    fewer_rows,
    fewer_rows_of_the_same_parameter,
    new_module,
    adapter,
    other_head,
    hook_that_doubles,
    hooks_in_a_new_dict,
    own_forward,
    parametrization,
    pruning,
    other_epsilon,
    other_limit,
    float16,
    no_gradients_wanted,
    untied,
    other_states,
    states_in_place,
    new_cache,
    states_of_other_layers,
    start_again,
    several_tokens,
    layers_swapped,
    layer_removed,
]
# how many of 4 steps after the change are recorded ones; of others none, for a while
REPEATED = dict.fromkeys((other_weights, no_gradients_wanted, states_in_place, start_again, several_tokens), 4)
REPEATED |= dict.fromkeys((other_states, new_cache, states_of_other_layers), 2)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_tokens_is_seen(change, replays):
    with torch.no_grad():
        chat, other = map(Chat, make())
        check_same(chat, other)
        before, expected = len(replays), copy.deepcopy(other).steps(1)
        change(chat), change(other)
        if change is not no_gradients_wanted:
            assert not torch.equal(copy.deepcopy(other).steps(1), expected), "the change shows nothing"
        check_same(chat, other)
    assert before == 2
    seen = len(replays) - before - (2 if change is hooks_in_a_new_dict else 0)
    assert seen == REPEATED.get(change, 0)


def test_a_changed_model_is_recorded_again(replays):
    with torch.no_grad():
        chat, other = map(Chat, make())
        check_same(chat, other)
        hooks = [
            layer.register_forward_hook(lambda *given: given[-1] * 2)
            for layer in (mixer(chat.model), mixer(other.model))
        ]
        check_same(chat, other)
        for hook in hooks:
            hook.remove()
        assert len(replays) == 2
        check_same(chat, other, 2 * _decoding._PAUSE + 8)
        assert len(replays) > 2


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
