"""Decoding on the CPU token by token, by recorded steps and by modules."""

import copy

import torch

from mamba_ssm import MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils.generation import InferenceParams

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


def mixer(model):
    """The mixer of the second layer."""
    return model.backbone.layers[1].mixer


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


def check_same(chat, other, count=4):
    assert torch.equal(chat.steps(count), other.steps(count))
    assert all(map(torch.equal, chat.states(), other.states()))
