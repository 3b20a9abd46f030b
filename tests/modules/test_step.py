"""What one decoding step of a layer and of a model calls: on a GPU each of these operators is one or two launches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_ssm import Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils.generation import InferenceParams

VIEWS = {"squeeze", "unsqueeze", "view", "slice", "split", "expand", "t", "alias", "detach", "_reshape_alias"}


class Calls(TorchDispatchMode):
    """The names of operators that are called, but for views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "module,step",
    [
        (Mamba(64), "mamba_step"),
        (Mamba2(64), "mamba2_step"),
        (Mamba2(64, headdim=16, ngroups=2, D_has_hdim=True, norm_before_gate=True), "mamba2_step"),
        (Mamba2(64, headdim=16, rmsnorm=False, dt_limit=(0.01, 0.1)), "mamba2_step"),
        (Mamba3(64), "mamba3_block_step"),
        (Mamba3(64, headdim=16, is_mimo=True, ngroups=2, is_outproj_norm=True), "mamba3_block_step"),
    ],
    ids=["mamba", "mamba2", "mamba2_groups", "mamba2_limits", "mamba3", "mamba3_mimo"],
)
def test_a_layer(module, step, device):
    """Nothing that is the same at every token is computed: not A of A_log, no copies and no expansions."""
    module = module.to(device, torch.bfloat16)
    states = module.allocate_inference_cache(2, 1)
    x = torch.randn(2, 1, 64).to(device, torch.bfloat16)
    with Calls() as calls:
        module.step(x, *states)
    assert calls.names == ["linear", step, "linear"]


@pytest.mark.parametrize(
    "layer,step", [("Mamba1", "mamba_step"), ("Mamba2", "mamba2_step"), ("Mamba3", "mamba3_block_step")]
)
def test_a_model(layer, step, device):
    config = MambaConfig(d_model=64, n_layer=2, vocab_size=50, ssm_cfg={"layer": layer})
    model = MambaLMHeadModel(config, device=device, dtype=torch.bfloat16)
    params = InferenceParams(max_seqlen=9, max_batch_size=2, seqlen_offset=1)
    token = torch.zeros(2, 1, dtype=torch.long, device=device)
    with torch.no_grad():
        model(token, inference_params=params, num_last_tokens=1)
        with Calls() as calls:
            model(token, inference_params=params, num_last_tokens=1)
    layers = ["add_norm", "linear", step, "linear"] * 2
    assert calls.names == ["embedding", *layers, "add_norm", "linear"]


def test_a_projection_with_a_bias(device):
    """Mamba's x_proj has none, but may be replaced by one that has: a step counts it as a prompt does."""
    torch.manual_seed(0)
    block = Mamba(32).to(device)
    block.x_proj = torch.nn.Linear(block.d_inner, block.dt_rank + 2 * block.d_state, device=device)
    x = torch.randn(1, 5, 32, device=device)
    states = block.allocate_inference_cache(1, 5)
    with torch.no_grad():
        whole = block(x)
        steps = torch.cat([block.step(x[:, i : i + 1], *states)[0] for i in range(5)], 1)
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-5)
