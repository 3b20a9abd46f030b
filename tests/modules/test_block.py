"""Block and GatedMLP: the fused add and norm equals the plain one, the residual's dtype, names, errors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mamba_ssm.modules.block import Block
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.ops.triton.layer_norm import RMSNorm


def make(norm, mlp, fused, in_fp32):
    torch.manual_seed(0)
    mlp_cls = partial(GatedMLP, hidden_features=40, multiple_of=8) if mlp else nn.Identity
    block = Block(24, partial(Mamba, d_state=4), mlp_cls, norm, fused_add_norm=fused, residual_in_fp32=in_fp32)
    nn.init.normal_(block.norm.weight)
    return block


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("mlp", [True, False], ids=["mlp", "no_mlp"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_fused_equals_plain(norm, mlp, first, device):
    x = torch.randn(2, 9, 24, device=device)
    residual = None if first else torch.randn(2, 9, 24, device=device)
    fused, plain = (make(norm, mlp, fused, True).to(device) for fused in (True, False))
    plain.load_state_dict(fused.state_dict())
    ours, theirs = fused(x, residual), plain(x, residual)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    added = x if first else x + residual
    mixed = plain.mixer(plain.norm(added))
    expected = added + mixed if mlp else added
    torch.testing.assert_close(theirs[1], expected, rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(block(x, residual)[0].square().sum(), list(block.parameters())) for block in (fused, plain)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_dtype_of_the_residual(in_fp32, fused):
    block = make(RMSNorm, True, fused, in_fp32).to(torch.bfloat16)
    x = torch.randn(2, 9, 24, dtype=torch.bfloat16)
    hidden, residual = block(x)
    assert hidden.dtype == torch.bfloat16
    assert residual.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    hidden, residual = block(hidden, residual)
    assert hidden.dtype == torch.bfloat16
    assert residual.dtype == (torch.float32 if in_fp32 else torch.bfloat16)


def test_names():
    assert {name.partition(".")[0] for name in make(RMSNorm, True, True, True).state_dict()} == {
        "norm",
        "mixer",
        "norm2",
        "mlp",
    }
    lean = make(RMSNorm, False, True, True)
    assert {name.partition(".")[0] for name in lean.state_dict()} == {"norm", "mixer"}
    states = lean.allocate_inference_cache(3, 10, dtype=torch.bfloat16)
    assert states[0].shape == (3, 48, 4) and states[1].dtype == torch.bfloat16


def test_fused_needs_a_norm_it_knows():
    with pytest.raises(TypeError, match="takes LayerNorm or RMSNorm, got Identity"):
        Block(8, Mamba, nn.Identity, nn.Identity, fused_add_norm=True)


def test_gated_mlp():
    mlp = GatedMLP(24, bias=True)
    assert mlp.fc1.weight.shape == (2 * 128, 24)  # 8/3 * 24 = 64, rounded up to 128
    x = torch.randn(5, 24)
    y, gate = mlp.fc1(x)[:, :128], mlp.fc1(x)[:, 128:]
    torch.testing.assert_close(mlp(x), mlp.fc2(y * gate * gate.sigmoid()))
    relu = GatedMLP(24, 10, 7, activation=F.relu, multiple_of=4)
    assert relu.fc1.weight.shape == (24, 24) and relu.fc2.weight.shape == (7, 12) and relu.fc1.bias is None
    y, gate = relu.fc1(x).chunk(2, dim=-1)
    torch.testing.assert_close(relu(x), relu.fc2(y * gate.clamp(min=0)))
    del mlp.in_features  # as in one pickled whole by an earlier version
    assert mlp(x).shape == (5, 24)
