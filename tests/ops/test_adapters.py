"""Fused functions that are given the weights of projections: LoRA and quantised layers around these count."""

import sys
import types

import pytest
import torch
from _helpers import mamba2_inner_inputs, mamba_inner_inputs
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, mamba_inner_ref
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined, mamba_split_conv1d_scan_ref


@pytest.fixture(autouse=True)
def transformers(monkeypatch):
    """Loaded, as far as the look-up of layers can see."""
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))


class Lora(nn.Module):
    """As peft's: its weight is the frozen one of the layer that it wraps, unless all is trained."""

    def __init__(self, base, frozen=True):
        super().__init__()
        self.base_layer = base.requires_grad_(not frozen)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype, device=base.weight.device)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype, device=base.weight.device)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Quantised(nn.Module):
    """A weight that no operator takes."""

    def __init__(self, base):
        super().__init__()
        self.scale = base.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((base.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = base.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def dense(layer):
    """What a projection multiplies by."""
    if isinstance(layer, Lora):
        return layer.base_layer.weight + layer.up.weight @ layer.down.weight
    return layer.weight * layer.scale if isinstance(layer, Quantised) else layer.weight


class Layer(nn.Module):
    """A mixer of transformers; the call goes through a function of theirs."""

    __module__ = "transformers.models.mamba.modeling_mamba"

    def __init__(self, function, tensors, rest, wraps):
        super().__init__()
        self.function, self.tensors, self.rest = function, tensors, rest
        out = "outproj" if function is mamba_split_conv1d_scan_combined else "out_proj"
        self.names = {f"{out}_weight": "out_proj"}
        self.out_proj = linear(tensors[f"{out}_weight"], tensors[f"{out}_bias"])
        if "x_proj_weight" in tensors:
            self.names["x_proj_weight"] = "x_proj"
            self.x_proj = linear(tensors["x_proj_weight"])
        for name, wrap in wraps.items():
            setattr(self, name, wrap(getattr(self, name)))

    def forward(self, function=None, weight=lambda layer: layer.weight):
        weights = {key: weight(getattr(self, name)) for key, name in self.names.items()}

        def call():
            return (function or self.function)(**{**self.tensors, **weights}, **self.rest)

        return call()


def mamba(dtype, device, **wraps):
    tensors = mamba_inner_inputs.inputs(dtype, device)
    return Layer(mamba_inner_fn, tensors, {}, wraps), mamba_inner_ref


def mamba2(dtype, device, **wraps):
    tensors, rest = mamba2_inner_inputs.inputs(dtype, device)
    return Layer(mamba_split_conv1d_scan_combined, tensors, rest, wraps), mamba_split_conv1d_scan_ref


def trained_lora(base):
    return Lora(base, frozen=False)


CASES = [
    pytest.param(mamba, {"x_proj": Lora}, id="mamba-lora"),
    pytest.param(mamba, {"out_proj": Lora}, id="mamba-lora_out"),
    pytest.param(mamba, {"x_proj": Quantised, "out_proj": Lora}, id="mamba-quantised"),
    pytest.param(mamba, {"x_proj": trained_lora}, id="mamba-trained_lora"),
    pytest.param(mamba2, {"out_proj": trained_lora}, id="mamba2-trained_lora"),
    pytest.param(mamba2, {"out_proj": Lora}, id="mamba2-lora"),
    pytest.param(mamba2, {"out_proj": Quantised}, id="mamba2-quantised"),
]


@pytest.mark.parametrize("make,wraps", CASES)
def test_values_and_gradients(make, wraps, device):
    layer, reference = make(torch.float32, device, **wraps)
    given = layer.tensors["xz" if make is mamba else "zxbcdt"].requires_grad_()
    wanted = [given, *(parameter for name, parameter in layer.named_parameters() if "down" in name or "up" in name)]
    found, expected = layer(), layer(reference, dense)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad(found, wanted, weights)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, wanted, weights), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(layer(), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make,wraps", CASES)
def test_modules_in_the_place_of_weights(make, wraps, device):
    """What any code can give, whichever layer calls."""
    layer, reference = make(torch.float32, device, **wraps)
    expected, found = layer(reference, dense), call_from_elsewhere(layer, lambda module: module)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def call_from_elsewhere(layer, weight):
    weights = {key: weight(getattr(layer, name)) for key, name in layer.names.items()}
    return layer.function(**{**layer.tensors, **weights}, **layer.rest)


@pytest.mark.parametrize("make", [mamba, mamba2])
def test_only_layers_of_transformers_are_looked_for(make, monkeypatch):
    layer, _ = make(torch.float32, "cpu", out_proj=Lora)
    fused = call_from_elsewhere(layer, lambda module: module.weight)  # the weight alone
    assert not torch.allclose(fused, layer())
    monkeypatch.setattr(Layer, "__module__", "elsewhere")
    assert torch.equal(layer(), fused)
    monkeypatch.setattr(Layer, "__module__", "transformers_modules.of_the_hub")
    assert not torch.allclose(layer(), fused)
    monkeypatch.delitem(sys.modules, "transformers")
    assert torch.equal(layer(), fused)


def pruned(layer):
    return prune.random_unstructured(layer, "weight", 0.3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("wrap", [pruned, nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.parametrize("make", [mamba, mamba2])
def test_weights_that_are_computed(make, wrap, device):
    """Each training step computes them again, from parameters that the last one changed."""
    layer, reference = make(torch.float32, device, out_proj=wrap)
    parameters = [parameter for name, parameter in layer.out_proj.named_parameters() if "weight" in name]
    for _ in range(2):
        found = layer()
        gradients = torch.autograd.grad(found.square().sum(), parameters)
        layer.out_proj(torch.zeros(1, layer.out_proj.in_features, device=device))  # hooks compute the weight
        expected = layer(reference)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        others = torch.autograd.grad(expected.square().sum(), parameters)
        torch.testing.assert_close(gradients, others, rtol=1e-3, atol=1e-2)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.5)


@pytest.mark.parametrize("make", [mamba, mamba2])
def test_frozen_weights_alone_stay_fused(make, device):
    """One node computes all, as it does for trained weights."""
    layer, _ = make(torch.float32, device)
    layer.tensors["xz" if make is mamba else "zxbcdt"].requires_grad_()
    trained = layer()
    layer.requires_grad_(False)
    frozen = layer()
    assert type(frozen.grad_fn) is type(trained.grad_fn)
    assert torch.equal(frozen, trained)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_adapter_within_a_checkpoint(reentrant, device):
    """What checkpoint calls again is a closure, without the layer's own frame above it."""

    class Checkpointed(Layer):
        def forward(self, xz):
            def inner(xz):
                weights = {"out_proj_weight": self.out_proj.weight, "x_proj_weight": self.x_proj.weight}
                return self.function(**{**self.tensors, "xz": xz, **weights})

            return checkpoint(inner, xz, use_reentrant=reentrant)

    tensors = mamba_inner_inputs.inputs(torch.float32, device)
    layer, plain = (kind(mamba_inner_fn, tensors, {}, {"out_proj": Lora}) for kind in (Checkpointed, Layer))
    plain.load_state_dict(layer.state_dict())
    layer(tensors["xz"].detach().requires_grad_()).square().sum().backward()
    plain().square().sum().backward()
    torch.testing.assert_close(layer.out_proj.up.weight.grad, plain.out_proj.up.weight.grad)


def test_other_modules_of_the_layer_are_left_alone():
    """A scripted one, and one whose weight is computed by steps of its own each time that it is read."""
    layer, _ = mamba(torch.float32, "cpu")
    expected, projections = layer(), {name: layer._modules.pop(name) for name in ("out_proj", "x_proj")}
    layer.scripted = torch.jit.script(nn.LayerNorm(4))
    layer.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    layer._modules.update(projections)  # behind the others
    before = [buffer.clone() for buffer in layer.spectral.buffers()]
    assert torch.equal(layer(), expected)
    assert all(map(torch.equal, before, layer.spectral.buffers()))


def test_a_parallel_projection_is_reduced_by_who_hands_over_its_weight():
    class Row(nn.Linear):
        process_group = None

        def forward(self, x):
            raise AssertionError("reduces over ranks, as its caller does")

    layer, _ = mamba2(torch.float32, "cpu")
    weight = layer.out_proj.weight
    layer.out_proj = Row(weight.shape[1], weight.shape[0])
    assert layer().shape[-1] == weight.shape[0]
