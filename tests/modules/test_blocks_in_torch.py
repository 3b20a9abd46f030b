"""The blocks inside torch: compilers, export, checkpointed activations, copies, what is kept."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from _helpers.cases import assert_all_close, grads_of
from torch.utils.checkpoint import checkpoint

from mamba_ssm import Mamba, Mamba2, Mamba3

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SMALL, MIMO = {"d_state": 16, "headdim": 8}, {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True}
KINDS = {
    "mamba": partial(Mamba, 24),
    "mamba_slow": partial(Mamba, 24, use_fast_path=False),
    "mamba2": partial(Mamba2, 24, **SMALL),
    "mamba2_slow": partial(Mamba2, 24, **SMALL, use_mem_eff_path=False),
    "mamba3": partial(Mamba3, 24, **SMALL),
    "mamba3_mimo": partial(Mamba3, 24, **SMALL, **MIMO),
}
every_block = pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("slow")])
only_mamba3 = pytest.mark.parametrize("kind", ["mamba3", "mamba3_mimo"])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def module(kind, device):
    torch.manual_seed(0)
    return KINDS[kind]().to(device)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic, module, device, request):
    if not dynamic:
        request.getfixturevalue("needs_inductor")
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager" if dynamic else "inductor")
    parameters = list(module.parameters())
    for seqlen in (40, 80) if dynamic else (80,):  # with fixed sizes each is compiled anew
        x = torch.randn(2, seqlen, 24, device=device)
        assert_all_close(grads_of(compiled, x, parameters), grads_of(module, x, parameters), 1e-3)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_compile_under_autocast(module, device):
    def run(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return module(x)

    x = torch.randn(2, 40, 24, device=device)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    torch.testing.assert_close(out, run(x), rtol=2e-2, atol=2e-2)


@only_mamba3
def test_compile_of_packed_sequences_under_autocast(module, device):
    def run(x, cu_seqlens):
        with torch.autocast(device, dtype=torch.bfloat16):
            return module(x, cu_seqlens=cu_seqlens)

    x, cu_seqlens = torch.randn(1, 40, 24, device=device), torch.tensor([0, 13, 40], device=device)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(x, cu_seqlens)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, run(x, cu_seqlens), rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.skipif(TORCH < (2, 4), reason="torch 2.2 cannot compile operators that write in place")
@every_block
def test_compile_step(kind, module, device):
    shape = (2, 24) if kind.startswith("mamba3") else (2, 1, 24)
    compiled = torch.compile(module.step, fullgraph=True, backend="aot_eager")
    ours, theirs = module.allocate_inference_cache(2, 9), module.allocate_inference_cache(2, 9)
    for _ in range(3):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(compiled(x, *ours)[0], module.step(x, *theirs)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "nonstrict"])
def test_export_with_dynamic_length(strict, kind, module, device):
    if TORCH < (2, 4) and not strict:
        pytest.skip("torch before 2.4 has no dynamic sizes in non-strict export")
    length = torch.export.Dim("length", min=2, max=4096)
    arguments = (torch.randn(2, 20, 24, device=device),)
    program = torch.export.export(module, arguments, dynamic_shapes=({1: length},), strict=strict)
    operators = {"mamba": ["mamba_inner"], "mamba_slow": ["selective_scan", "causal_conv1d"]}.get(kind, [])
    assert {f"mamba_ssm.{name}.default" for name in operators} <= {str(node.target) for node in program.graph.nodes}
    x = torch.randn(2, 150, 24, device=device)
    run = program.module() if hasattr(program, "module") else program
    torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-5)
    if TORCH >= (2, 4):  # parameters keep their names, and the program trains
        theirs, ours = dict(run.named_parameters()), dict(module.named_parameters())
        gradients = torch.autograd.grad(run(x).square().sum(), [theirs[name] for name in ours])
        expected = torch.autograd.grad(module(x).square().sum(), list(ours.values()))
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-3)


@only_mamba3
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant, module, device):
    x, parameters = torch.randn(2, 70, 24, device=device), list(module.parameters())
    expected = grads_of(module, x, parameters)
    u = x.clone().requires_grad_()
    out = checkpoint(module, u, use_reentrant=reentrant)
    out.square().sum().backward()  # reentrant ones know no torch.autograd.grad
    assert_all_close([out, u.grad, *(parameter.grad for parameter in parameters)], expected, 1e-5)


@pytest.mark.parametrize("options", [{}, MIMO], ids=["siso", "mimo"])
def test_what_is_kept_for_backward(options):
    """The inputs of both projections and in_proj's output, and little else: neither chunk states nor each head's q and
    k. Upstream keeps 1.5 GB of such a layer.
    """
    module = Mamba3(2048, **options, device="meta", dtype=torch.bfloat16)
    x, kept = torch.empty(8, 2048, 2048, device="meta", dtype=torch.bfloat16), {}
    known = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    steps = 2 * 8 * 2048
    least = steps * (module.in_proj.out_features + module.d_inner + 2048)
    assert out.is_meta and least <= sum(storage.nbytes() for storage in kept.values()) < 1.25 * least < 0.75e9


@every_block
def test_copies(kind, module, device):
    x = torch.randn(2, 9, 24, device=device)
    expected = module(x)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), expected)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = KINDS[kind]().to(device)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("shape", [(2, 0, 24), (0, 5, 24)], ids=["no_steps", "no_batch"])
def test_empty_input(shape, kind, device):
    module = KINDS[kind](device=device, **({} if kind.startswith("mamba3") else {"bias": True}))
    x = torch.randn(shape, device=device, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert out.shape == shape == x.grad.shape
    assert module.in_proj.weight.grad.count_nonzero() == 0
