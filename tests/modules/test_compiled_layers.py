"""Layers of a language model in compiled programs: an operator for forward and one for backward, which give what the
layers give.
"""

import contextlib
import json
from functools import partial

import pytest
import torch
from _helpers.planned_calls import in_a_row
from torch import nn
from torch.utils.checkpoint import checkpoint

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm._torch import private
from mamba_ssm._torch.registry import LATEST
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.modules.block import Block
from mamba_ssm.ops.block_node import IN_A_ROW
from mamba_ssm.ops.norm import RMSNorm

pytestmark = pytest.mark.skipif(not private.COMPILES_FUNCTIONS, reason="torch 2.8 and later compile layers so")

D = 16
MIXERS = {
    "Mamba": partial(Mamba, d_state=4),
    "Mamba with biases": partial(Mamba, d_state=4, bias=True),
    "Mamba2": partial(Mamba2, d_state=8, headdim=8),
    "Mamba2 with biases": partial(Mamba2, d_state=8, headdim=8, bias=True, rmsnorm=False),
    "Mamba2 with MLP channels": partial(Mamba2, d_state=8, headdim=8, d_ssm=16),
    "Mamba3": partial(Mamba3, d_state=8, headdim=8),
    "Mamba3 MIMO": partial(Mamba3, d_state=8, headdim=8, is_mimo=True, mimo_rank=2, chunk_size=8, is_outproj_norm=True),
}
# The same kernels; the sums of products may be taken in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CLOSE_16 = {"rtol": 2e-2, "atol": 2e-2}  # bfloat16, rounded once more or less between the two


def settings_of(node):
    """A call's settings by the names of compiled.py."""
    return dict(zip(("version", "arguments", "autocast", "returned", "copied"), json.loads(node.args[2]), strict=True))


class Seen:
    """A backend that runs a program as it was traced, and keeps the operators of this package that are in it."""

    def __init__(self):
        self.names, self.autocast, self.graphs = [], [], 0

    def __call__(self, module, example_inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        self.graphs += 1
        keep = partial(self._keep, make_boxed_func)
        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(module, example_inputs)

    def _keep(self, boxed, module, example_inputs):
        for node in module.graph.nodes:
            target = str(node.target)
            if "mamba_ssm" in target:
                self.names.append(node.args[0] if "planned_function" in target else target)
                self.autocast += [settings_of(node)["autocast"]] if "planned_function" in target else []
        return boxed(module.forward)


@pytest.fixture
def seen():
    torch.compiler.reset()
    yield Seen()
    torch.compiler.reset()


def make(name, device, layers, dtype=torch.float32, norm=RMSNorm):
    torch.manual_seed(0)
    factory = {"device": device, "dtype": dtype}
    mixer, norm = partial(MIXERS[name], **factory), partial(norm, **factory)
    return nn.ModuleList(Block(D, mixer, nn.Identity, norm, fused_add_norm=True) for _ in range(layers))


def stream(device, shape=(2, 5), dtype=torch.float32):
    torch.manual_seed(1)
    x, residual = torch.randn(2, *shape, D, device=device)
    return x.to(dtype).requires_grad_(), residual.requires_grad_()


def run(call, blocks, x, residual, use=(1.0, 1.0)):
    """Results, and the gradients of what requires them. use: how much of each result."""
    results = call(x, residual)
    total = sum(
        share * (result.float() * torch.linspace(-1, 1, result.numel(), device=x.device).view_as(result)).sum()
        for share, result in zip(use, results, strict=True)
        if share
    )
    leaves = [tensor for tensor in (x, residual, *blocks.parameters()) if tensor.requires_grad]
    return [*results, *torch.autograd.grad(total, leaves, allow_unused=True)]


def names_of(name, layers):
    kind = name.split()[0].lower()
    node = f"{kind}_layer_node" if layers == 1 else f"{kind}_{layers}_layers_node"
    return [node, f"{node}_backward"]


@pytest.mark.parametrize(
    ("name", "layers", "norm"),
    [
        *((name, 1, RMSNorm) for name in MIXERS),
        *((name, IN_A_ROW, RMSNorm) for name in ("Mamba", "Mamba2", "Mamba3")),
        ("Mamba2", 1, nn.LayerNorm),
    ],
)
def test_as_called(device, seen, name, layers, norm):
    blocks = make(name, device, layers, norm=norm)
    eager = partial(in_a_row, blocks)
    compiled = torch.compile(eager, backend=seen, fullgraph=True)
    for shape in ((2, 5), (2, 5), (3, 7), (4, 40)) if layers == 1 else ((2, 5), (2, 5)):  # then with open sizes
        given = stream(device, shape)
        torch.testing.assert_close(run(compiled, blocks, *given), run(eager, blocks, *given), **CLOSE)
    assert seen.graphs == (2 if layers == 1 else 1)
    assert seen.names == names_of(name, layers) * seen.graphs


@pytest.mark.parametrize("inside", [True, False], ids=["autocast inside", "autocast outside"])
@pytest.mark.parametrize("name", ["Mamba with biases", "Mamba2 with biases", "Mamba3 MIMO"])
def test_autocast(device, seen, name, inside):
    blocks, given = make(name, device, 1), stream(device)
    autocast = partial(torch.autocast, device, torch.bfloat16)

    def call(x, residual):
        with autocast():
            return in_a_row(blocks, x, residual)

    compiled = torch.compile(call if inside else partial(in_a_row, blocks), backend=seen, fullgraph=True)

    def from_outside(x, residual):
        with contextlib.nullcontext() if inside else autocast():
            return compiled(x, residual)

    found, expected = run(from_outside, blocks, *given), run(call, blocks, *given)
    assert found[0].dtype == torch.bfloat16
    assert [one.dtype for one in found] == [other.dtype for other in expected]
    torch.testing.assert_close(found, expected, **CLOSE_16)
    assert seen.names == names_of(name, 1)
    assert seen.autocast == ["torch.bfloat16", None]  # gradients are computed without


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_16_bits(device, seen, name):
    blocks, given = make(name, device, 1, torch.bfloat16), stream(device, dtype=torch.bfloat16)
    eager = partial(in_a_row, blocks)
    found = run(torch.compile(eager, backend=seen, fullgraph=True), blocks, *given)
    torch.testing.assert_close(found, run(eager, blocks, *given), **CLOSE_16)
    assert seen.names == names_of(name, 1)


@pytest.mark.parametrize("use", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_results_that_are_not_used(device, seen, name, use):
    blocks, given = make(name, device, 1), stream(device)
    eager = partial(in_a_row, blocks)
    found = run(torch.compile(eager, backend=seen, fullgraph=True), blocks, *given, use)
    for one, other in zip(found, run(eager, blocks, *given, use), strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, **CLOSE)


@pytest.mark.parametrize("frozen", ["norm", "mixer.in_proj", "mixer.out_proj", "mixer", "x", "all but x"])
@pytest.mark.parametrize("name", ["Mamba with biases", "Mamba2 with biases", "Mamba3"])
def test_what_is_frozen(device, seen, name, frozen):
    blocks, (x, residual) = make(name, device, 1), stream(device)
    if frozen == "x":
        x, residual = x.detach(), residual.detach()
    elif frozen == "all but x":
        blocks.requires_grad_(False)
        residual = residual.detach()
    else:
        blocks[-1].get_submodule(frozen).requires_grad_(False)
    eager = partial(in_a_row, blocks)
    found = run(torch.compile(eager, backend=seen, fullgraph=True), blocks, x, residual)
    torch.testing.assert_close(found, run(eager, blocks, x, residual), **CLOSE)


@pytest.mark.parametrize("layers", [1, IN_A_ROW])
def test_tensors_that_are_given_twice(device, seen, layers):
    (block,), (x, _) = make("Mamba2", device, 1), stream(device)

    def shared(x, residual):
        return in_a_row([block] * layers, x, residual)

    found = run(torch.compile(shared, backend=seen, fullgraph=True), block, x, x.detach())
    torch.testing.assert_close(found, run(shared, block, x, x.detach()), **CLOSE)
    same = partial(torch.compile(block, backend=seen, fullgraph=True), x)
    for one, other in zip(same(x), block(x, x), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_parameters_from_outside(seen):
    """Their sizes may be open, so the layer is its operators."""
    (block,), given = make("Mamba2", "cpu", 1), stream("cpu")
    parameters = {name: parameter.detach().clone().requires_grad_() for name, parameter in block.named_parameters()}

    def call(parameters, x, residual):
        return torch.func.functional_call(block, parameters, (x, residual))

    found, _ = torch.compile(call, backend=seen, fullgraph=True, dynamic=True)(parameters, *given)
    torch.testing.assert_close(found, call(parameters, *given)[0], **CLOSE)
    assert "mamba2_layer_node" not in seen.names


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_checkpoints(device, seen, name):
    blocks, given = make(name, device, 1), stream(device)

    def again(x, residual):
        return checkpoint(partial(in_a_row, blocks), x, residual, use_reentrant=False)

    found = run(torch.compile(again, backend=seen, fullgraph=True), blocks, *given)
    torch.testing.assert_close(found, run(partial(in_a_row, blocks), blocks, *given), **CLOSE)


def test_a_mixer_with_a_hook_is_called(seen):
    blocks, given = make("Mamba2", "cpu", 1), stream("cpu")
    expected = blocks[0](*given)[0] + 1
    blocks[0].mixer.register_forward_hook(lambda module, args, out: out + 1)
    out, _ = torch.compile(blocks[0], backend=seen)(*given)
    torch.testing.assert_close(out, expected)
    assert "mamba2_layer_node" not in seen.names


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_opcheck(device, seen, name, monkeypatch):
    """Of the operator as a compiled program calls it."""
    blocks, given = make(name, device, 1), stream(device)
    calls, run_it = [], LATEST["planned_function", device.upper()]

    def kept(*arguments):
        calls.append(arguments)
        return run_it(*arguments)

    monkeypatch.setitem(LATEST, ("planned_function", device.upper()), kept)
    run(torch.compile(partial(in_a_row, blocks), backend=seen), blocks, *given)
    monkeypatch.undo()
    assert [called for called, *_ in calls] == names_of(name, 1)
    op = torch.ops.mamba_ssm.planned_function.default
    for called, tensors, settings in calls:
        tensors = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        # The other checks compare all values; Mamba keeps states between pieces, which nothing writes if there is one.
        torch.library.opcheck(op, (called, tensors, settings), test_utils=("test_schema", "test_faketensor"))


def test_a_model_by_the_whole_compiler(device):
    """With open sizes in the second call."""
    torch.manual_seed(0)
    layer = {"layer": "Mamba2", "headdim": 8, "d_state": 8}
    config = MambaConfig(d_model=D, n_layer=1 + IN_A_ROW, vocab_size=20, ssm_cfg=layer)
    model = MambaLMHeadModel(config, device=device)

    def loss(tokens):
        with torch.autocast(device, torch.bfloat16):
            return model(tokens, labels=tokens).loss

    compiled = torch.compile(loss, fullgraph=True)
    for batch, length in ((2, 9), (3, 11), (4, 30)):
        tokens = torch.randint(20, (batch, length), device=device)
        for one, other in zip(
            torch.autograd.grad(compiled(tokens), [*model.parameters()]),
            torch.autograd.grad(loss(tokens), [*model.parameters()]),
            strict=True,
        ):
            torch.testing.assert_close(one, other, **CLOSE_16)
    torch.compiler.reset()
