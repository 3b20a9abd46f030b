"""attention_maps: the matrix of each scan, tried on the scan itself."""

import pytest
import torch
import torch.nn.functional as F

from mamba_ssm import BiMamba2, Hydra, Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.utils import attention
from mamba_ssm.utils.attention import attention_maps
from mamba_ssm.utils.reference import plain_torch

WIDTH, LENGTH = 32, 21
MIMO = {"is_mimo": True, "mimo_rank": 2, "chunk_size": 16}
LAYERS = {
    "Mamba": (Mamba, {"d_state": 4}, 1),
    "Mamba v1": (Mamba, {"d_state": 4, "bimamba_type": "v1"}, 2),
    "Mamba v2": (Mamba, {"d_state": 4, "bimamba_type": "v2"}, 2),
    "Mamba v3": (Mamba, {"d_state": 4, "bimamba_type": "v3", "nslices": 3}, 3),
    "Mamba2": (Mamba2, {"d_state": 8, "headdim": 16}, 1),
    "Mamba2 groups": (Mamba2, {"d_state": 8, "headdim": 8, "ngroups": 4, "D_has_hdim": True}, 1),
    "Hydra": (Hydra, {"d_state": 8, "headdim": 16}, None),
    "BiMamba2": (BiMamba2, {"d_state": 8, "headdim": 16}, 2),
    "Mamba3": (Mamba3, {"d_state": 8, "headdim": 16}, 1),
    "MIMO": (Mamba3, {"d_state": 8, "headdim": 16, **MIMO}, 1),
}


def make(name):
    kind, options, scans = LAYERS[name]
    return kind(WIDTH, **options), torch.randn(2, LENGTH, WIDTH), scans


def recorded(layer, x):
    """What a layer's scans are given."""
    return attention._record(layer, (x,), {})


@pytest.mark.parametrize("name", LAYERS)
def test_the_matrix_is_the_scan(name):
    """M x for random x, against the scan of x, for each scan that the layer runs."""
    layer, x, scans = make(name)
    maps = attention_maps(layer, x)
    found = recorded(layer, x)
    assert len(maps) == len(found) and scans in (None, len(maps))
    for one, (_, operator, given) in zip(maps, found, strict=True):
        scan, of_batch, same, (batch, seqlen, heads) = attention._SCANS[operator](given, None, 0)
        assert one.matrix.shape == (batch, heads, seqlen, seqlen)
        values = torch.randn(batch, seqlen, heads)
        y = scan(values, of_batch | same)
        torch.testing.assert_close(torch.einsum("bhij,bjh->bih", one.matrix, values), y, rtol=1e-4, atol=1e-4)
        upper, lower = one.matrix.triu(1), one.matrix.tril(-1)
        assert not (lower if one.reverse else upper).any() and (upper if one.reverse else lower).any()


def test_mamba_by_its_formula():
    """C_i exp(sum of dt A) dt_j B_j, and D on the diagonal."""
    layer, x, _ = make("Mamba")
    (one,) = attention_maps(layer, x)
    given = recorded(layer, x)[0][2]
    bias = 0 if given["delta_bias"] is None else given["delta_bias"][:, None]
    delta = F.softplus(given["delta"] + bias) if given["delta_softplus"] else given["delta"]
    steps = (delta[:, :, None] * given["A"][:, :, None]).cumsum(-1)  # (B, D, N, L)
    decay = (steps[..., :, None] - steps[..., None, :]).exp().tril()
    B, C = (given[name].reshape(2, 1, 4, LENGTH) for name in "BC")
    expected = (C[..., :, None] * decay * (B * delta[:, :, None])[..., None, :]).sum(2)
    expected = expected + torch.diag_embed(given["D"][:, None].expand(-1, LENGTH))
    torch.testing.assert_close(one.matrix, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2 groups", "MIMO"])
def test_rows_and_heads(name):
    layer, x, _ = make(name)
    whole = attention_maps(layer, x)[0].matrix
    part = attention_maps(layer, x, rows=[3, -1, 0], heads=slice(1, None, 2))[0].matrix
    torch.testing.assert_close(part, whole[:, 1::2][:, :, [3, LENGTH - 1, 0]])
    assert attention_maps(layer, x, rows=[])[0].matrix.shape[2] == 0
    for wrong, message in (({"rows": [LENGTH]}, f"rows must lie in 0..{LENGTH - 1}"), ({"heads": [999]}, "heads must")):
        with pytest.raises(ValueError, match=message):
            attention_maps(layer, x, **wrong)


def test_rows_come_in_pieces(monkeypatch):
    layer, x, _ = make("Mamba2")
    whole = attention_maps(layer, x)[0].matrix
    monkeypatch.setattr(attention, "_AT_ONCE", 3 * 2 * LENGTH * whole.shape[1])
    torch.testing.assert_close(attention_maps(layer, x)[0].matrix, whole)


def test_channels_of_mimo_differ():
    layer, x, _ = make("MIMO")
    torch.nn.init.normal_(layer.mimo_x)
    first, second = (attention_maps(layer, x, channel=channel)[0].matrix for channel in (0, 1))
    assert not torch.allclose(first, second)
    with pytest.raises(ValueError, match=r"channel must lie in 0..15, got 16"):
        attention_maps(layer, x, channel=16)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_packed_sequences_do_not_see_each_other(name):
    layer, x, _ = make(name)
    seq_idx = torch.zeros(2, LENGTH, dtype=torch.int32)
    seq_idx[:, 9:] = 1
    matrix = attention_maps(layer, x, seq_idx=seq_idx)[0].matrix
    assert not matrix[:, :, 9:, :9].any() and matrix[:, :, 10:, 9:].any()


def test_a_model_names_its_layers_and_stays_as_it_was():
    model = MambaLMHeadModel(MambaConfig(d_model=WIDTH, n_layer=3, vocab_size=50)).eval()
    tokens = torch.randint(50, (1, 9))
    before = model(tokens).logits
    maps = attention_maps(model, tokens, heads=[0])
    assert [one.layer for one in maps] == [f"backbone.layers.{i}.mixer" for i in range(3)]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(tokens).logits, before)


def test_a_module_without_scans():
    with pytest.raises(ValueError, match="attention_maps: Linear ran no scan of a block of mamba_ssm"):
        attention_maps(torch.nn.Linear(3, 3), torch.randn(1, 3))


@pytest.mark.parametrize("context", [torch.inference_mode, plain_torch])
def test_where_it_cannot_be(context):
    layer, x, _ = make("Mamba")
    with context(), pytest.raises(RuntimeError, match=r"attention_maps .*: call it outside"):
        attention_maps(layer, x)


def test_half_precision_weights():
    layer, x, _ = make("Mamba")
    (one,) = attention_maps(layer.bfloat16(), x.bfloat16())
    assert one.matrix.dtype == torch.float32 and one.matrix.isfinite().all()
