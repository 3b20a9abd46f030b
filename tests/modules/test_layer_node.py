"""A layer of a language model as one autograd node, and several in a row, give what their norms and mixers give when
they are called.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from _helpers.planned_calls import in_a_row
from torch import nn
from torch.utils.checkpoint import checkpoint

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm.models.mixer_seq_simple import MixerModel
from mamba_ssm.modules.block import Block
from mamba_ssm.ops.block_node import IN_A_ROW
from mamba_ssm.ops.norm import RMSNorm

MIXERS = {
    "Mamba": partial(Mamba, d_state=4),
    "Mamba with biases": partial(Mamba, d_state=4, bias=True),
    "Mamba2": partial(Mamba2, d_state=8, headdim=8),
    "Mamba2 with biases": partial(Mamba2, d_state=8, headdim=8, bias=True, rmsnorm=False),
    "Mamba3": partial(Mamba3, d_state=8, headdim=8),
    "Mamba3 MIMO": partial(Mamba3, d_state=8, headdim=8, is_mimo=True, mimo_rank=2, chunk_size=8, is_outproj_norm=True),
}
TWICE = [name for name in MIXERS if "Mamba3" not in name]  # which have second derivatives
D, SHAPE = 16, (2, 5, 16)


class Row(nn.ModuleList):
    """Blocks in a row, as one node where they can be."""

    def forward(self, x, residual):
        return in_a_row(self, x, residual)


def make(name, device, norm=RMSNorm, dtype=torch.float32, layers=1):
    torch.manual_seed(0)
    factory = {"device": device, "dtype": dtype}
    mixer, norm = partial(MIXERS[name], **factory), partial(norm, **factory)
    blocks = [Block(D, mixer, nn.Identity, norm, fused_add_norm=True) for _ in range(layers)]
    with torch.no_grad():
        for block in blocks:
            block.norm.weight.uniform_(0.5, 2)
    return blocks[0] if layers == 1 else Row(blocks)


def in_parts(block):
    """The same, whose mixers somebody watches, so that they have to be called."""
    other = copy.deepcopy(block)
    for module in other.modules():
        if isinstance(module, Block):
            module.mixer.register_forward_hook(lambda module, args, out: None)
    return other


@pytest.fixture(params=[1, IN_A_ROW], ids=["alone", "in a row"])
def layers(request):
    return request.param


def stream(device, dtype=torch.float32, residual_dtype=torch.float32):
    torch.manual_seed(1)
    x, residual = torch.randn(2, *SHAPE, device=device)
    return x.to(dtype).requires_grad_(), residual.to(residual_dtype).requires_grad_()


def run(block, x, residual, use=(1.0, 1.0), context=nullcontext):
    """Results and the gradients of what requires them; use: how much of each result."""
    with context():
        results = block(x, residual)
    # weights that differ, and pass through float32
    total = sum(
        share * (result.float() * torch.linspace(-1, 1, result.numel(), device=x.device).view(SHAPE)).sum()
        for share, result in zip(use, results, strict=True)
        if share
    )
    leaves = [tensor for tensor in (x, residual, *block.parameters()) if tensor.requires_grad]
    return [*results, *torch.autograd.grad(total, leaves, allow_unused=True)]


def is_one_node(block, *given):
    return "_layer" in type(block(*given)[0].grad_fn).__name__


# The same kernels; the sums of products may be taken in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CLOSE_16 = {"rtol": 2e-2, "atol": 2e-2}  # bfloat16, rounded once more or less between the two


@pytest.mark.parametrize("norm", [RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("name", MIXERS)
def test_as_in_parts(device, name, norm, layers):
    block, given = make(name, device, norm, layers=layers), stream(device)
    for _ in range(3):  # then by plans
        assert is_one_node(block, *given)
        torch.testing.assert_close(run(block, *given), run(in_parts(block), *given), **CLOSE)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXERS)
def test_dtypes(device, name, residual_dtype, layers):
    block = make(name, device, dtype=torch.bfloat16, layers=layers)
    given = stream(device, torch.bfloat16, residual_dtype)
    for _ in range(3):
        assert is_one_node(block, *given)
        torch.testing.assert_close(run(block, *given), run(in_parts(block), *given), **CLOSE_16)


@pytest.mark.parametrize("name", MIXERS)
def test_autocast(device, name, layers):
    block, context = make(name, device, layers=layers), partial(torch.autocast, device, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32):
        given = stream(device, dtype)
        results = run(block, *given, context=context)
        assert results[0].dtype == torch.bfloat16
        torch.testing.assert_close(results, run(in_parts(block), *given, context=context), **CLOSE_16)
    run(block, *stream(device))  # and none after it


@pytest.mark.parametrize("use", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_results_that_are_not_used(device, name, use, layers):
    block, given = make(name, device, layers=layers), stream(device)
    found, expected = run(block, *given, use), run(in_parts(block), *given, use)
    for one, other in zip(found, expected, strict=True):
        if other is None and one is not None:  # of a layer whose output is not used, behind one whose output is
            other = torch.zeros_like(one)
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("frozen", ["norm", "mixer.in_proj", "mixer.out_proj", "mixer", "x", "all but x"])
@pytest.mark.parametrize("name", ["Mamba with biases", "Mamba2 with biases", "Mamba3"])
def test_what_is_frozen(device, name, frozen, layers):
    block, (x, residual) = make(name, device, layers=layers), stream(device)
    if frozen == "x":
        x, residual = x.detach(), residual.detach()
    elif frozen == "all but x":
        block.requires_grad_(False)
        residual = residual.detach()
    else:
        first = block if layers == 1 else block[1]
        first.get_submodule(frozen).requires_grad_(False)
    for _ in range(3):
        torch.testing.assert_close(run(block, x, residual), run(in_parts(block), x, residual), **CLOSE)


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(device, name, layers):
    block, given = make(name, device, layers=layers), stream(device)

    def twice(layer):
        parameters = list(layer.parameters())
        out, total = layer(*given)
        grads = torch.autograd.grad((out.square().sum() + total.sin().sum()), (*given, *parameters), create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), (*given, *parameters))

    # gradients of gradients are as large as a hundred
    torch.testing.assert_close(twice(block), twice(in_parts(block)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_checkpoints_and_saved_tensors_elsewhere(device, name, layers):
    block, given = make(name, device, layers=layers), stream(device)
    expected = run(block, *given)

    def again(x, residual):
        return checkpoint(block, x, residual, use_reentrant=False)

    again.parameters = block.parameters
    halves = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone())
    for _ in range(3):
        torch.testing.assert_close(run(again, *given), expected, **CLOSE)
        torch.testing.assert_close(run(block, *given, context=lambda: halves), expected, **CLOSE)


class Other(Mamba2):
    def forward(self, u, **options):
        return super().forward(u, **options) + 1


def with_hook(block):
    block.mixer.register_forward_hook(lambda module, args, out: out + 1)


def of_a_class_of_its_own(block):
    block.mixer.__class__ = Other


def with_its_own_forward(block):
    forward = block.mixer.forward
    block.mixer.forward = lambda *args, **options: forward(*args, **options) + 1


def with_an_adapter(block):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    block.mixer.out_proj.__class__ = Adapter


def in_a_wrapper(block):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, x, **options):
            return self.inner(x, **options) + 1

    block.mixer = Wrapper(block.mixer)


@pytest.mark.parametrize(
    "change", [with_hook, of_a_class_of_its_own, with_its_own_forward, with_an_adapter, in_a_wrapper]
)
def test_mixers_that_are_more_than_their_parameters_are_called(change):
    block, given = make("Mamba2", "cpu"), stream("cpu")
    expected = block(*given)[0] + 1
    change(block)
    torch.testing.assert_close(block(*given)[0], expected)


def test_global_hooks_see_mixers():
    block, given, seen = make("Mamba2", "cpu"), stream("cpu"), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        block(*given)
    finally:
        hook.remove()
    assert Mamba2 in seen


def test_wrong_inputs_are_named():
    block, (x, residual) = make("Mamba2", "cpu"), stream("cpu")
    with pytest.raises(TypeError, match=r"hidden_states must be a torch.Tensor"):
        block(None, residual)
    with pytest.raises(ValueError, match=r"Mamba2: the input must be \(B, L, d_model\) with d_model = 16"):
        block(x[..., :8], residual[..., :8])
    with pytest.raises(ValueError, match="residual"):
        block(x, residual[:, :4])


def layer_nodes(out):
    """The names of the layers' autograd nodes that lead to it, the first first."""
    names, pending = [], [out.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        names += [node.name()] if "layer" in node.name() else []
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        pending += following
    return [name.removesuffix("Backward") for name in reversed(names)]


def hooked(model, layer):
    model.layers[layer].register_forward_hook(lambda module, args, out: None)


def compiled(model, layer):
    model.layers[layer].compile(backend="eager")


def called_in_its_own_way(model, layer):
    class Called(Block):
        def __call__(self, *given, **options):
            return super().__call__(*given, **options)

    model.layers[layer].__class__ = Called


@pytest.mark.parametrize("limit", ["_MOST_ELEMENTS", "_MOST_CHANNELS"])
@pytest.mark.parametrize(
    ("options", "change", "expected"),
    [
        ({}, None, ["mamba2_4_layers_node", "mamba2_layer_node"]),
        ({}, lambda model: hooked(model, 5), ["mamba2_4_layers_node", "mamba2_layer_node"]),
        ({}, lambda model: hooked(model, 3), ["mamba2_layer_node"] * 5),
        ({}, lambda model: called_in_its_own_way(model, 3), ["mamba2_layer_node"] * 5),
        ({}, lambda model: compiled(model, 1), ["mamba2_4_layers_node"]),
        ({"attn_layer_idx": [2], "attn_cfg": {"num_heads": 2}}, None, ["mamba2_layer_node"] * 4),
        ({"d_intermediate": 32}, None, ["mamba2_layer_node"] * 5),
        ({"fused_add_norm": False}, None, []),
    ],
    ids=[
        "plain",
        "the last one is watched",
        "one is watched",
        "one is called in its own way",
        "one is compiled",
        "attention",
        "MLPs",
        "norms apart",
    ],
)
def test_layers_of_a_model(monkeypatch, options, change, expected, limit):
    torch.manual_seed(0)
    sizes = {"d_intermediate": 0, "fused_add_norm": True, **options}
    model = MixerModel(
        D, 6, vocab_size=20, rms_norm=True, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8}, **sizes
    )
    if change is not None:
        change(model)
    tokens = torch.randint(20, SHAPE[:2])
    out = model(tokens)
    assert layer_nodes(out) == expected
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), out)
    monkeypatch.setattr(f"mamba_ssm.modules.block.{limit}", 1)
    large = model(tokens)
    assert "mamba2_4_layers_node" not in layer_nodes(large)
    grads, others = (torch.autograd.grad(one.square().sum(), [*model.parameters()]) for one in (out, large))
    torch.testing.assert_close(grads, others)
