"""A change of the model between two tokens is seen by recorded steps: the results stay those of the modules."""

import copy

import pytest
import torch
from _helpers.chat import Chat, check_same, make, mixer
from torch.nn.utils import parametrize, prune

from mamba_ssm.models import _decoding


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
