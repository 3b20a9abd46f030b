"""What blocks and models are called with: errors name the block, the argument, and what came."""

import pytest
import torch
from torch import nn

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.block import Block
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.modules.mha import MHA
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
from mamba_ssm.utils.generation import InferenceParams

WITH_STATES = {
    "Mamba": lambda: Mamba(16, layer_idx=0),
    "Mamba2": lambda: Mamba2(16, headdim=8, layer_idx=0),
    "Mamba3": lambda: Mamba3(16, headdim=8, layer_idx=0),
    "MHA": lambda: MHA(16, 2, layer_idx=0),
}
MIXERS = {**WITH_STATES, "Mamba2Simple": lambda: Mamba2Simple(16, headdim=8)}
MODULES = {
    **MIXERS,
    "GatedMLP": lambda: GatedMLP(16),
    "Block": lambda: Block(16, Mamba, nn.Identity),
    "MixerModel": lambda: MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=21)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_what_is_no_tensor(kind):
    np = pytest.importorskip("numpy")
    module = MODULES[kind]()
    for wrong in (None, np.zeros((1, 3, 16), np.float32), [1, 2]):
        with pytest.raises(TypeError, match=f"{kind}: .* must be a torch.Tensor, got {type(wrong).__name__}"):
            module(wrong)


@pytest.mark.parametrize("kind", [kind for kind in MODULES if kind != "Block"])
def test_a_scalar(kind):
    wrong = torch.tensor(1) if kind == "MixerModel" else torch.tensor(1.0)
    with pytest.raises(ValueError, match=rf"{kind}: .* must be .*, got .*\(\)"):
        MODULES[kind]()(wrong)


def test_widths_and_tokens():
    with pytest.raises(ValueError, match=r"GatedMLP: .* in_features = 16, got \(2, 8\)"):
        GatedMLP(16)(torch.ones(2, 8))
    model = MODULES["MixerModel"]()
    with pytest.raises(ValueError, match=r"input_ids must be int64 \(B, L\), got torch.float32 of \(1, 3\)"):
        model(torch.ones(1, 3))
    model.backbone.embedding = nn.Identity()  # which takes embeddings instead
    assert model(torch.ones(1, 3, 16)).logits.shape == (1, 3, 24)


@pytest.mark.parametrize("kind", MIXERS)
def test_packed_sequences_that_are_no_dense_tensor(kind):
    x, module = torch.ones(1, 5, 16), MIXERS[kind]()
    with pytest.raises(TypeError, match=f"{kind}: seq_idx must be a torch.Tensor, got list"):
        module(x, seq_idx=[[0] * 5])
    with pytest.raises(ValueError, match=r"seq_idx must .* \(1, 5\), got \(\)"):
        module(x, seq_idx=torch.tensor(0, dtype=torch.int32))
    if kind in ("Mamba2", "Mamba3", "MHA"):
        with pytest.raises(TypeError, match=f"{kind}: cu_seqlens must be a dense tensor, got torch.sparse_coo"):
            module(x, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32).to_sparse())


@pytest.mark.parametrize("kind", WITH_STATES)
def test_an_offset_below_0(kind):
    params = InferenceParams(max_seqlen=8, max_batch_size=1, seqlen_offset=-1)
    with pytest.raises(ValueError, match=f"{kind}: seqlen_offset must be .*, got -1"):
        WITH_STATES[kind]()(torch.ones(1, 1, 16), inference_params=params)


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_swapped_states(kind):
    """Named, and nothing is written: Mamba's convolution would take the other for the state of a wider one."""
    module, x = WITH_STATES[kind](), torch.ones(1, 1, 16)
    conv_state, ssm_state = (state.normal_() for state in module.allocate_inference_cache(1, 0))
    before = conv_state.clone(), ssm_state.clone()
    swapped = rf"{kind}: ssm_state must have shape \(B, .*swapped"
    with pytest.raises(ValueError, match=swapped):
        module.step(x, ssm_state, conv_state)
    params = InferenceParams(max_seqlen=8, max_batch_size=1, key_value_memory_dict={0: (ssm_state, conv_state)})
    with pytest.raises(ValueError, match=swapped):
        module(x, inference_params=params)
    assert torch.equal(conv_state, before[0]) and torch.equal(ssm_state, before[1])
    with pytest.raises(TypeError, match=f"{kind}: conv_state must be a torch.Tensor, got NoneType"):
        module.step(x, None, ssm_state)


def test_ssd_minimal():
    with pytest.raises(TypeError, match=r"X must be a torch\.Tensor, got NoneType"):
        ssd_minimal_discrete(None, torch.ones(1, 4, 2), torch.ones(1, 4, 2, 5), torch.ones(1, 4, 2, 5), 2)
