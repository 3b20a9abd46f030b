"""Mamba2Simple: upstream's state dict, both paths against the reference, learnable initial states."""

import pytest
import torch

from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_ref


def small(**options):
    return Mamba2Simple(24, **{"d_state": 16, "headdim": 8, **options})


def reference(module, x, seq_idx=None):
    initial_states = None
    if module.learnable_init_states:
        initial_states = module.init_states.expand(x.shape[0], -1, -1, -1)
    return mamba_split_conv1d_scan_ref(
        module.in_proj(x),
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        module.dt_bias,
        -torch.exp(module.A_log),
        module.D,
        64,
        dt_limit=module.dt_limit,
        activation=module.activation,
        rmsnorm_weight=module.norm.weight,
        rmsnorm_eps=1e-5,
        outproj_weight=module.out_proj.weight,
        outproj_bias=module.out_proj.bias,
        headdim=module.headdim,
        ngroups=module.ngroups,
        norm_before_gate=False,
        initial_states=initial_states,
        seq_idx=seq_idx,
    )


def test_state_dict_has_upstreams_names_and_shapes():
    module = Mamba2Simple(64, learnable_init_states=True, bias=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "init_states": (1, 128, 64),
        "dt_bias": (1,),
        "A_log": (1,),
        "D": (1,),
        "in_proj.weight": (2 * 128 + 2 * 64 + 1, 64),
        "in_proj.bias": (2 * 128 + 2 * 64 + 1,),
        "conv1d.weight": (128 + 2 * 64, 1, 4),
        "conv1d.bias": (128 + 2 * 64,),
        "norm.weight": (128,),
        "out_proj.weight": (64, 128),
        "out_proj.bias": (64,),
    }
    assert module.init_states.eq(0).all() and module.init_states._no_weight_decay
    assert "init_states" not in small(conv_bias=False).state_dict()


OPTIONS = [
    {},
    {"ngroups": 2, "learnable_init_states": True, "bias": True},
    {"activation": None, "conv_bias": False, "d_conv": 3, "dt_limit": (0.02, 0.05)},
]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_the_reference(options, fast, device):
    module = small(use_mem_eff_path=fast, **options).to(device)
    if module.learnable_init_states:
        torch.nn.init.normal_(module.init_states)
    x = torch.randn(3, 37, 24, device=device, requires_grad=True)
    wanted = [x, *module.parameters()]
    found, expected = module(x), reference(module, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(out.square().sum(), wanted) for out in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_packed_sequences(fast, device):
    module = small(use_mem_eff_path=fast).to(device)
    x = torch.randn(1, 50, 24, device=device)
    seq_idx = torch.tensor([0] * 13 + [1] * 37, dtype=torch.int32, device=device)[None]
    apart = torch.cat([module(x[:, :13]), module(x[:, 13:])], dim=1)
    torch.testing.assert_close(module(x, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)


def test_low_precision(device):
    module = small().to(device, torch.bfloat16)
    out = module(torch.randn(2, 9, 24, device=device, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def test_sizes_that_cannot_work():
    with pytest.raises(ValueError, match=r"Mamba2Simple: .* must be a multiple of headdim \(128\), got 48"):
        Mamba2Simple(24)
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got 'relu'"):
        small(activation="relu")
    with pytest.raises(ValueError, match="Mamba2Simple: conv_init must be a number of at least 0, got -1"):
        small(conv_init=-1)
    with pytest.raises(ValueError, match=r"Mamba2Simple: A_init_range must be \(smallest, largest\), got \(2, 1\)"):
        small(A_init_range=(2, 1))
