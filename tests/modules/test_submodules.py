"""Projections, norms and convolutions that users replace or hook: no fused path may pass by what they add."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import prune

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm.modules.block import Block, add_norm
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.modules.mha import MHA
from mamba_ssm.ops.norm import RMSNorm
from mamba_ssm.utils.generation import InferenceParams

SIZES = {"d_state": 16, "headdim": 8}
BLOCKS = {
    "mamba": lambda **options: Mamba(24, layer_idx=0, **options),
    "mamba2": lambda **options: Mamba2(24, layer_idx=0, **SIZES, **options),
    "mamba2_simple": lambda **options: Mamba2Simple(24, **SIZES, **options),
    "mamba3": lambda **options: Mamba3(24, layer_idx=0, **SIZES, **options),
    "mimo": lambda **options: Mamba3(
        24, layer_idx=0, is_mimo=True, mimo_rank=3, is_outproj_norm=True, **SIZES, **options
    ),
    "mha": lambda **options: MHA(24, 4, causal=True, d_conv=3, layer_idx=0),
}
PROJECTIONS = [
    *(("mamba", name) for name in ("in_proj", "x_proj", "dt_proj", "out_proj")),
    *((kind, name) for kind in BLOCKS if kind != "mamba" for name in ("in_proj", "out_proj")),
]
CONVOLVED = [kind for kind in BLOCKS if kind not in ("mamba3", "mimo")]
NORMS = [("mamba2", "norm"), ("mamba2_simple", "norm"), ("mamba3", "B_norm"), ("mimo", "C_norm"), ("mimo", "norm")]
PARTS = [*PROJECTIONS, *((kind, "conv1d") for kind in CONVOLVED), *NORMS]


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, whose weight and bias it passes on, as peft's layers do."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    @torch.no_grad()
    def merged(self):
        linear = copy.deepcopy(self.base)
        linear.weight += self.up.weight @ self.down.weight
        return linear


def outputs(module, x):
    """What a whole forward gives, and a prefill in two pieces and a step where the block has them."""
    found = [module(x)]
    if isinstance(module, Mamba2Simple):
        return found
    with torch.no_grad():
        params = InferenceParams(max_seqlen=x.shape[1], max_batch_size=x.shape[0])
        parts = []
        for start, end in ((0, 5), (5, x.shape[1] - 1), (x.shape[1] - 1, x.shape[1])):
            params.seqlen_offset = start
            parts.append(module(x[:, start:end], inference_params=params))
        found.append(torch.cat(parts, dim=1))
    return found


def assert_outputs(module, other, device):
    x = torch.randn(2, 9, 24, device=device)
    for found, expected in zip(outputs(module, x), outputs(other, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind,name", PROJECTIONS)
def test_an_adapter_counts(kind, name, device):
    module = BLOCKS[kind](device=device) if kind != "mha" else BLOCKS[kind]().to(device)
    merged = copy.deepcopy(module)
    adapter = Adapter(getattr(module, name)).to(device)
    setattr(module, name, adapter)
    setattr(merged, name, adapter.merged())
    assert_outputs(module, merged, device)
    module(torch.randn(2, 9, 24, device=device)).square().sum().backward()
    assert adapter.up.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "mamba3", "mimo"])
def test_compile_with_adapters_and_hooks(kind, device):
    module = BLOCKS[kind]().to(device)
    module.in_proj = Adapter(module.in_proj).to(device)
    module.out_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    x = torch.randn(2, 9, 24, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out, expected = compiled(x), module(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    up = module.in_proj.up.weight
    found, wanted = (torch.autograd.grad(y.square().sum(), up)[0] for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind,name", PARTS)
def test_hooks_run_and_may_change_the_output(kind, name, device):
    module = BLOCKS[kind]().to(device)
    plain = copy.deepcopy(module)
    seen = []
    handle = getattr(module, name).register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert_outputs(module, plain, device)
    assert len(seen) == (1 if kind == "mamba2_simple" else 4)
    handle.remove()
    getattr(module, name).register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    x = torch.randn(2, 9, 24, device=device)
    assert not torch.equal(module(x), plain(x))


@pytest.mark.parametrize("kind", BLOCKS)
def test_training_with_pruned_weights(kind, device):
    """torch's pruning makes the weight anew before each call of the module it prunes."""
    module = BLOCKS[kind]().to(device)
    names = [name for name in ("in_proj", "x_proj", "dt_proj", "conv1d", "out_proj") if hasattr(module, name)]
    for name in names:
        prune.random_unstructured(getattr(module, name), "weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(2, 9, 24, device=device)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():  # the weights as they are now, which can be copied
        module(x)
    baked = copy.deepcopy(module)
    for name in names:
        prune.remove(getattr(baked, name), "weight")
    assert_outputs(module, baked, device)


def offload(module):
    """Parameters of submodules are where they belong only while the submodule runs, as with accelerate's hooks."""
    for child in module.children():
        real = dict(child._parameters)
        away = {name: None if tensor is None else nn.Parameter(tensor.to("meta")) for name, tensor in real.items()}
        child._parameters.update(away)

        def forward(*arguments, child=child, real=real, away=away):
            child._parameters.update(real)
            try:
                return type(child).forward(child, *arguments)
            finally:
                child._parameters.update(away)

        child.forward = forward
    return module


@pytest.mark.parametrize("kind", BLOCKS)
def test_offloaded_parameters(kind, device):
    module = BLOCKS[kind]().to(device)
    assert_outputs(offload(copy.deepcopy(module)), module, device)


@pytest.mark.parametrize("kind", BLOCKS)
def test_parameters_held_elsewhere(kind, device):
    """Plain tensors in their place, as in the replicas of DataParallel and where a wrapper flattens parameters."""
    module = BLOCKS[kind]().to(device)
    other = copy.deepcopy(module)
    held = [parameter.detach().requires_grad_() for parameter in other.parameters()]
    names = [name for name, _ in other.named_parameters()]
    for name, tensor in zip(names, held, strict=True):
        owner, _, leaf = name.rpartition(".")
        owner = other.get_submodule(owner)
        del owner._parameters[leaf]
        setattr(owner, leaf, tensor)
    assert not list(other.parameters())
    assert_outputs(other, module, device)
    x = torch.randn(2, 9, 24, device=device)
    found = torch.autograd.grad(other(x).square().sum(), held, allow_unused=True)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()), allow_unused=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind,name", [part for part in PARTS if part not in NORMS])
def test_parametrized_weights(kind, name):
    module = BLOCKS[kind]()
    plain = copy.deepcopy(module)
    nn.utils.parametrizations.weight_norm(getattr(module, name))
    assert_outputs(module, plain, "cpu")
    module(torch.randn(2, 9, 24)).square().sum().backward()
    assert getattr(module, name).parametrizations.weight.original0.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", BLOCKS)
def test_dynamic_quantisation(kind):
    """Eight bits a weight: the projections' outputs are off by about a hundredth of their size."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no kernels for quantised layers")
    module = BLOCKS[kind]().eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that torchao is the place for it now
        quantised = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
        assert type(quantised.out_proj) is not nn.Linear
        x = torch.randn(2, 9, 24)
        for found, expected in zip(outputs(quantised, x), outputs(module, x), strict=True):
            assert (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "mamba2_simple"])
def test_packed_sequences_need_the_convolution_as_it_was_made(kind):
    module = BLOCKS[kind]()
    module.conv1d.register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match="need conv1d as it was made, got one with hooks or replaced by Conv1d"):
        module(torch.randn(1, 5, 24), seq_idx=torch.zeros(1, 5, dtype=torch.int32))


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_a_hooked_norm_is_called(norm):
    block = Block(24, lambda dim: BLOCKS["mamba"](), nn.Identity, norm_cls=norm, fused_add_norm=True)
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    expected = block(x, residual)
    seen = []
    block.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(block(x, residual), expected)
    assert len(seen) == 1


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(24, elementwise_affine=False)], ids=["none", "affine"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_without_weight(fused, norm):
    x, residual = torch.randn(2, 3, 24, dtype=torch.bfloat16), torch.randn(2, 3, 24)
    out, total = add_norm(x, residual, norm, fused, residual_in_fp32=True)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out, norm(total.bfloat16()))


@pytest.mark.parametrize("kind", BLOCKS)
def test_sizes_without_values(kind):
    """On the meta device: shapes of outputs and gradients, no memory."""
    module = BLOCKS[kind]().to("meta")
    out = module(torch.randn(2, 9, 24, device="meta"))
    assert out.shape == (2, 9, 24) and out.is_meta
    out.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in module.parameters())


@pytest.mark.parametrize("shape", [(9, 24), (2, 9, 23), (2, 2, 9, 24)], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_inputs_of_another_shape(kind, shape):
    with pytest.raises(ValueError, match=r"the input must be \(B, L, d_model\) with d_model = 24, got \("):
        BLOCKS[kind]()(torch.randn(shape))


@pytest.mark.parametrize("kind", ["mamba2", "mamba3", "mha"])
def test_wrong_bounds_of_packed_sequences(kind):
    module, x = BLOCKS[kind](), torch.randn(1, 5, 24)
    for bounds in ([1, 5], [0, 6], [0, 3, 2, 5], [5]):
        with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to at most the 5 steps of x, got \["):
            module(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor, got list"):
        module(x, cu_seqlens=[0, 5])
    for wrong in (torch.tensor([[0, 5]]), torch.tensor([0.0, 5.0]), torch.tensor([], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"cu_seqlens must be \(sequences \+ 1,\) of int32, got"):
            module(x, cu_seqlens=wrong)
    with pytest.raises(ValueError, match="cu_seqlens must be on cpu like the input, got meta"):
        module(x, cu_seqlens=torch.tensor([0, 5], device="meta"))


@pytest.mark.parametrize("block", [Mamba, Mamba2, Mamba3])
def test_a_step_of_a_subclass_is_the_one_that_decodes(block, device):
    class Doubled(block):
        def step(self, hidden_states, *states):
            out, *states = super().step(hidden_states, *states)
            return 2 * out, *states

    torch.manual_seed(0)
    module = Doubled(64, layer_idx=0, **({} if block is Mamba else {"headdim": 16, "d_state": 16})).to(device)
    x, cache = torch.randn(2, 5, 64, device=device), InferenceParams(max_seqlen=8, max_batch_size=2)
    with torch.no_grad():
        whole = module(x)
        module(x[:, :4], inference_params=cache)
        cache.seqlen_offset = 4
        last = module(x[:, 4:], inference_params=cache)
    torch.testing.assert_close(last, 2 * whole[:, 4:], rtol=1e-4, atol=1e-5)
