"""Blocks under a gradient penalty, torch.func, and step by step with gradients."""

import copy

import pytest
import torch

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm.modules.hydra import Hydra
from mamba_ssm.ops.causal_conv1d import causal_conv1d_step, causal_conv1d_update
from mamba_ssm.ops.state_update import selective_state_step, selective_state_update
from mamba_ssm.utils.reference import plain_torch

MAMBA2 = {"d_state": 4, "headdim": 8}
BLOCKS = {
    "mamba": lambda: Mamba(16, d_state=4, bias=True),
    "mamba_both_ways": lambda: Mamba(16, d_state=4, bimamba_type="v2"),
    "mamba2": lambda: Mamba2(16, **MAMBA2),
    "mamba2_gated_mlp": lambda: Mamba2(16, **MAMBA2, rmsnorm=False, bias=True, d_ssm=16),
    "hydra": lambda: Hydra(16, **MAMBA2),
}


def penalty_gradients(block, x):
    """Of WGAN-GP's penalty (arXiv 1704.00028): the norm of the critic's slope, away from 1."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    leaves = [x, *(weight for weight in block.parameters() if weight.requires_grad)]
    found = torch.autograd.grad(penalty, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]


def assert_close(found, expected, bound=2e-5):
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=1e-3).double()
        torch.testing.assert_close(one.double() / scale, other.double() / scale, rtol=0, atol=bound)


@pytest.mark.parametrize("name", BLOCKS)
def test_gradient_penalty(name, device):
    torch.manual_seed(0)
    block, x = BLOCKS[name]().to(device), torch.randn(2, 7, 16, device=device)
    found = penalty_gradients(block, x)
    with plain_torch():
        expected = penalty_gradients(copy.deepcopy(block).double(), x.double())
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_per_sample_gradients_and_hessian_products(name, device):
    torch.manual_seed(0)
    block, x = BLOCKS[name]().to(device), torch.randn(3, 7, 16, device=device)

    def results(block, x):
        def loss(parameters, x):
            return torch.func.functional_call(block, parameters, (x[None],)).square().sum()

        parameters = {key: weight.detach() for key, weight in block.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        slope = torch.func.grad(lambda x: block(x).square().sum())
        _, product = torch.func.jvp(slope, (x,), (torch.ones_like(x),))
        return *each.values(), product

    found = results(block, x)
    with plain_torch():
        assert_close(found, results(copy.deepcopy(block).double(), x.double()))


@pytest.mark.parametrize("block", [Mamba, Mamba2])
def test_penalty_where_the_node_has_not_kept_its_input(block, device):
    """With in_proj frozen, or under autocast: an error that names the cure, which works."""
    options = {"d_state": 4} if block is Mamba else MAMBA2
    fast = "use_fast_path" if block is Mamba else "use_mem_eff_path"
    layer, x = block(16, **options).to(device), torch.randn(2, 7, 16, device=device)
    expected = penalty_gradients(layer, x)
    with (
        torch.autocast(x.device.type, dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match=f"autocast.*{fast}=False"),
    ):
        penalty_gradients(layer, x)
    layer.in_proj.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"in_proj.weight is frozen.*{fast}=False"):
        penalty_gradients(layer, x)
    slow = block(16, **options, **{fast: False}).to(device)
    slow.load_state_dict(layer.state_dict())
    names = [name for name, _ in slow.named_parameters()]
    keep = [i for i, name in enumerate(["x", *names]) if name != "in_proj.weight"]
    slow.in_proj.weight.requires_grad_(False)
    assert_close(penalty_gradients(slow, x), [expected[i] for i in keep])


def test_penalty_in_sixteen_bits(device):
    layer, x = (
        Mamba(16, d_state=4).to(device, torch.bfloat16),
        torch.randn(2, 7, 16, device=device, dtype=torch.bfloat16),
    )
    found = penalty_gradients(layer, x)
    with plain_torch():
        expected = penalty_gradients(copy.deepcopy(layer).double(), x.double())
    assert_close(found, expected, bound=0.1)  # some dozen roundings to 8 bits


@pytest.mark.parametrize("name", ["A_log", "D"])
def test_parameters_written_before_the_second_backward(name, device):
    layer, x = Mamba(16, d_state=4).to(device), torch.randn(2, 7, 16, device=device, requires_grad=True)
    out = layer(x)
    with torch.no_grad():
        getattr(layer, name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_mamba3_refuses(device):
    layer, x = Mamba3(16, d_state=8, headdim=8).to(device), torch.randn(2, 5, 16, device=device)
    with pytest.raises(RuntimeError, match=r"no second derivative .*plain_torch"):
        penalty_gradients(layer, x)
    with pytest.raises(RuntimeError, match=r"does not work with torch\.func transforms"):
        torch.func.grad(lambda x: layer(x).sum())(x)


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "mamba2", "mamba2_gated_mlp"])
def test_training_step_by_step(name, device):
    torch.manual_seed(0)
    block, x = BLOCKS[name]().to(device), torch.randn(2, 5, 16, device=device, requires_grad=True)
    conv_state, ssm_state = states = block.allocate_inference_cache(2, 5)
    outs = []
    for t in range(5):
        out, conv_state, ssm_state = block.differentiable_step(x[:, t : t + 1], conv_state, ssm_state)
        outs.append(out)
    assert all((state == 0).all() for state in states)
    leaves = [x, *block.parameters()]
    stepwise, whole = torch.cat(outs, 1), block(x)
    torch.testing.assert_close(stepwise, whole, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(stepwise.square().sum(), leaves)
    assert_close(found, torch.autograd.grad(whole.square().sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_state_step_is_the_update(heads, several, dtype, device):
    torch.manual_seed(0)
    channels, steps = ((4, 3) if heads else (6,)), ((3,) if several else ())
    x, dt, z = (torch.randn(2, *steps, *channels).to(device, dtype) for _ in range(3))
    B, C = (torch.randn(2, *steps, *((2,) if heads else ()), 5).to(device, dtype) for _ in range(2))
    A, D, dt_bias = -torch.rand(*channels, 5), torch.randn(channels), torch.randn(channels)
    A, D, dt_bias = A.to(device), D.to(device), dt_bias.to(device)
    state = torch.randn(2, *channels, 5).to(device, dtype)
    out, new = selective_state_step(state, x, dt, A, B, C, D, z, dt_bias, True)
    expected = selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, True)
    bound = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}  # one rounding
    torch.testing.assert_close(out, expected, **bound)
    torch.testing.assert_close(new, state, **bound)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 1), (2, 6, 7)])
@pytest.mark.parametrize("state_len", [3, 5])
def test_convolution_step_is_the_update(shape, state_len, device):
    torch.manual_seed(0)
    x, state = torch.randn(shape, device=device), torch.randn(2, 6, state_len, device=device)
    weight, bias = torch.randn(6, 4, device=device), torch.randn(6, device=device)
    out, new = causal_conv1d_step(x, state, weight, bias, "silu")
    torch.testing.assert_close(out, causal_conv1d_update(x, state, weight, bias, "silu"), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(new, state)


def test_steps_name_what_is_wrong(device):
    x, state = torch.randn(2, 6, device=device), torch.randn(2, 6, 4, device=device)
    A, B = -torch.rand(6, 4, device=device), torch.randn(2, 4, device=device)
    with pytest.raises(ValueError, match="B must have shape"):
        selective_state_step(state, x, x, A, B[:1], B)
    with pytest.raises(TypeError, match="x must"):
        selective_state_step(state, x.long(), x, A, B, B)
    with pytest.raises(ValueError, match="conv_state must hold at least W-1 = 3 steps, got S = 2"):
        causal_conv1d_step(x, state[..., :2], torch.randn(6, 4, device=device))
    with pytest.raises(ValueError, match=r"x must be \(B, D\) or \(B, D, L\)"):
        causal_conv1d_step(x[0], state, torch.randn(6, 4, device=device))
    with pytest.raises(ValueError, match="a step takes one token"):
        layer = Mamba(16, d_state=4).to(device)
        layer.differentiable_step(torch.randn(2, 3, 16, device=device), *layer.allocate_inference_cache(2, 3))
