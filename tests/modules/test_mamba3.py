"""The Mamba-3 block: upstream's state dict, values, packed sequences, inference cache, autocast, called submodules."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import dtype_id

from mamba_ssm import Mamba3
from mamba_ssm.modules.mamba3 import heavy_tail_activation
from mamba_ssm.ops.mamba3_scan import mamba3_scan_ref

MIMO = {"is_mimo": True, "mimo_rank": 4}
KINDS = {
    "siso": {},
    "mimo": MIMO,
    "siso_norm": {"is_outproj_norm": True},
    "mimo_norm": {**MIMO, "is_outproj_norm": True, "rope_fraction": 1.0},
    "groups": {**MIMO, "mimo_rank": 3, "ngroups": 3, "rope_fraction": 0},
}


class Cache:
    """What Mamba3 needs of upstream's InferenceParams."""

    def __init__(self):
        self.key_value_memory_dict = {}
        self.seqlen_offset = 0


def small(**options):
    module = Mamba3(24, **{"d_state": 16, "headdim": 8, "layer_idx": 0, **options})
    with torch.no_grad():  # all that starts as ones would hide what is swapped
        for name, parameter in module.named_parameters():
            if "proj" not in name and name != "dt_bias":
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


@pytest.fixture(params=KINDS)
def module(request, device):
    torch.manual_seed(0)
    return small(**KINDS[request.param]).to(device)


def reference(module, u):
    """The block in float64, from its parameters, step by step."""
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    heads, rank, groups = module.nheads, module.mimo_rank, module.num_bc_heads
    matrix = rank * groups * module.d_state
    sizes = [module.d_inner, module.d_inner, matrix, matrix, heads, heads, heads, module.num_rope_angles]
    z, x, B, C, dt, A, trap, angles = (u.double() @ weights["in_proj.weight"].T).split(sizes, -1)

    def normed(matrix, weight):
        matrix = matrix.unflatten(-1, (rank, groups, module.d_state))
        return matrix / torch.sqrt(matrix.square().mean(-1, keepdim=True) + 1e-5) * weight

    dt = F.softplus(dt + weights["dt_bias"])
    A = -torch.where(A >= 0, 1 + A, 1 / (1 - A.clamp(max=0))).clamp(min=module.A_floor)
    x, z = (tensor.unflatten(-1, (heads, module.headdim)) for tensor in (x, z))
    y = mamba3_scan_ref(
        normed(C, weights["C_norm.weight"]),
        normed(B, weights["B_norm.weight"]),
        x,
        A * dt,
        dt,
        trap,
        weights["C_bias"],
        weights["B_bias"],
        angles,
        weights["D"],
        z,
        weights.get("mimo_x"),
        weights.get("mimo_z"),
        weights.get("mimo_o"),
        weights["norm.weight"].view(heads, -1) if module.is_outproj_norm else None,
        pairwise=not module.is_mimo,
    )
    y = y if module.is_mimo else y.squeeze(2)
    return y.flatten(2) @ weights["out_proj.weight"].T


def test_state_dict_has_upstreams_names_shapes_and_order():
    module = Mamba3(32, d_state=24, headdim=16, ngroups=2, is_mimo=True, mimo_rank=3, is_outproj_norm=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert list(shapes.items()) == [
        ("dt_bias", (4,)),
        ("B_bias", (4, 3, 24)),
        ("C_bias", (4, 3, 24)),
        ("mimo_x", (4, 3, 16)),
        ("mimo_z", (4, 3, 16)),
        ("mimo_o", (4, 3, 16)),
        ("D", (4,)),
        ("in_proj.weight", (2 * 64 + 2 * 3 * 2 * 24 + 3 * 4 + 6, 32)),
        ("B_norm.weight", (24,)),
        ("C_norm.weight", (24,)),
        ("norm.weight", (64,)),
        ("out_proj.weight", (32, 64)),
    ]
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    module.load_state_dict(checkpoint, strict=True)
    assert torch.equal(module.mimo_o, checkpoint["mimo_o"])
    lean = Mamba3(32, headdim=16).state_dict()
    assert not {"mimo_x", "mimo_z", "mimo_o", "norm.weight"} & lean.keys()
    assert lean["B_bias"].shape == (4, 1, 128)
    assert lean["in_proj.weight"].shape == (2 * 64 + 2 * 128 + 3 * 4 + 32, 32)


def test_initialisation():
    module = Mamba3(512, dt_min=0.01, dt_max=0.2, **MIMO, dtype=torch.bfloat16)
    dt = F.softplus(module.dt_bias)
    assert dt.min() >= 0.0099 and dt.max() <= 0.2001
    assert module.mimo_x.eq(0.25).all() and module.mimo_o.eq(0.25).all() and module.mimo_z.eq(1).all()
    assert module.D.eq(1).all() and module.B_bias.eq(1).all() and module.C_bias.eq(1).all()
    assert module.D._no_weight_decay and module.dt_bias._no_weight_decay
    for parameter in (module.dt_bias, module.B_bias, module.C_bias, module.D, module.mimo_x):
        assert parameter.dtype == torch.float32
    assert module.in_proj.weight.dtype == module.B_norm.weight.dtype == torch.bfloat16
    facts = module.d_inner, module.nheads, module.num_bc_heads, module.num_rope_angles, module.rotary_dim_divisor
    assert facts == (1024, 16, 1, 32, 4) and module.split_tensor_size == 64


@pytest.mark.parametrize(
    "options,message",
    [
        ({"d_state": 257}, r"d_state must be an integer from 1 to 256, got 257"),
        ({"headdim": 512}, r"headdim must be an integer from 1 to 256, got 512"),
        ({"headdim": 7}, r"must be a multiple of headdim \(7\), got 48"),
        ({"ngroups": 4}, "ngroups must divide the 6 heads, got 4"),
        ({"mimo_rank": 65}, "mimo_rank must be an integer from 1 to 64, got 65"),
        ({"rope_fraction": 1.5}, "rope_fraction must be at most 1, got 1.5"),
        ({"A_activation": "relu"}, "A_activation must be one of 'heavy_tail', 'softplus', got 'relu'"),
        ({"is_mimo": "no"}, "is_mimo must be True or False"),
    ],
    ids=str,
)
def test_sizes_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_unknown_arguments_have_no_effect_but_a_warning():
    with pytest.warns(UserWarning, match="Mamba3: these arguments have no effect: d_conv, use_tilelang"):
        Mamba3(24, headdim=8, d_conv=4, use_tilelang=True)


def test_heavy_tail_activation():
    x = torch.tensor([-1e38, -1e4, -1.0, 0.0, 1.0, 1e4, 1e38], requires_grad=True)
    y = heavy_tail_activation(x)
    torch.testing.assert_close(y, torch.tensor([1e-38, 1 / 10001, 0.5, 1.0, 2.0, 10001.0, 1e38]), rtol=1e-6, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0, 1 / 10001**2, 0.25, 1, 1, 1, 1]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("seqlen", [0, 1, 70])
def test_values_and_gradients(module, seqlen, device):
    u = torch.randn(2, seqlen, 24, device=device)
    parameters = list(module.parameters())

    def results(function):
        leaf = u.clone().requires_grad_()
        out = function(leaf)
        weights = torch.arange(out.numel(), device=device).view(out.shape).sin().to(out.dtype)
        return [out, *torch.autograd.grad((out * weights).sum(), [leaf, *parameters], materialize_grads=True)]

    for ours, true in zip(results(module), results(lambda u: reference(module, u)), strict=True):
        limit = 2e-5 * max(true.abs().max().item(), 1.0) if true.numel() else 0
        torch.testing.assert_close(ours.double(), true.double(), rtol=0, atol=limit)


def test_padding_of_zeros(device):
    """Where u is zero the activation of A is at its bend, and B and C are their biases alone."""
    module = small(**MIMO).to(device)
    u = torch.randn(2, 12, 24, device=device)
    u[:, 4:9] = 0
    results = []
    for function in (module, lambda u: reference(module, u)):
        leaf = u.clone().requires_grad_()
        out = function(leaf)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])])
    for ours, true in zip(*results, strict=True):
        limit = 2e-5 * max(true.abs().max().item(), 1.0)
        torch.testing.assert_close(ours.double(), true.double(), rtol=0, atol=limit)


@pytest.mark.parametrize(
    "options,seqlen",
    [
        ({"d_model": 256}, 100),
        ({"d_model": 256, "is_mimo": True, "mimo_rank": 4}, 100),
        ({"d_model": 432, "headdim": 48, "d_state": 96, "ngroups": 3}, 33),
        ({"d_model": 64, "headdim": 48, "expand": 1.5, "rope_fraction": 1.0}, 1),
    ],
    ids=str,
)
def test_sizes_that_upstream_is_asked_for(options, seqlen, device):
    """Forward, backward, and a prompt with steps behind it, of sizes at which upstream's kernels fail."""
    module = Mamba3(**options, layer_idx=0).to(device)
    u = torch.randn(2, seqlen, options["d_model"], device=device)
    out = module(u)
    out.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    cache, prompt = Cache(), max(seqlen - 3, 1)
    with torch.no_grad():
        parts = [module(u[:, :prompt], inference_params=cache)]
        for cache.seqlen_offset in range(prompt, seqlen):
            parts.append(module(u[:, cache.seqlen_offset, None], inference_params=cache))
    torch.testing.assert_close(torch.cat(parts, 1), out, rtol=1e-4, atol=1e-5)


def test_softplus_as_in_the_wheels_of_may(device):
    options = {"d_state": 16, "headdim": 8}
    heavy = small(**options).to(device)
    soft = Mamba3(24, **options, A_activation="softplus").to(device)
    soft.load_state_dict(heavy.state_dict(), strict=True)
    u = torch.randn(1, 9, 24, device=device)
    assert not torch.allclose(heavy(u), soft(u), atol=1e-4)
    heavy.A_activation = "softplus"
    assert torch.equal(heavy(u), soft(u))


@torch.no_grad()
def test_prompts_pieces_and_steps_are_one_forward(module, device):
    u = torch.randn(2, 40, 24, device=device)
    expected, cache, parts = module(u), Cache(), []
    for begin, end in ((0, 17), (17, 18), (18, 33), *((t, t + 1) for t in range(33, 40))):
        cache.seqlen_offset = begin
        parts.append(module(u[:, begin:end], inference_params=cache))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
    states = cache.key_value_memory_dict[0]
    cache.seqlen_offset = 0  # a new prompt begins from zero
    torch.testing.assert_close(module(u[:, :5], inference_params=cache), expected[:, :5], rtol=1e-4, atol=1e-5)
    assert cache.key_value_memory_dict[0] is states


@torch.no_grad()
def test_steps_of_both_shapes(module, device):
    u = torch.randn(3, 24, device=device)
    first, second = (module.allocate_inference_cache(3, 0) for _ in range(2))
    names = {"H": module.nheads, "S": module.num_rope_angles, "P": 8, "N": 16, "R": module.mimo_rank}
    shapes = [tuple(names[letter] for letter in shape) for shape in ("HS", "HPN", "RHN", "HP")]
    assert [tuple(state.shape) for state in first] == [(3, *shape) for shape in shapes]
    for _ in range(3):
        out, *states = module.step(u, *first)
        wide, *_ = module.step(u[:, None], *second)
        assert torch.equal(out, wide.squeeze(1)) and out.shape == u.shape
        assert all(state is given for state, given in zip(states, first, strict=True))
    with pytest.raises(ValueError, match=r"one token, \(B, d_model\) or \(B, 1, d_model\) .*, got \(3, 2, 24\)"):
        module.step(u[:, None].expand(3, 2, 24), *first)
    with pytest.raises(ValueError, match=r"ssm_state must have shape \(B, 6, 8, 16\), got"):
        module.step(u, first[0], first[3], first[2], first[3])


def test_packed_sequences(module, device):
    u = torch.randn(1, 60, 24, device=device)
    bounds = [0, 0, 17, 18, 60]
    cu_seqlens = torch.tensor(bounds, device=device)
    alone = torch.cat([module(u[:, begin:end]) for begin, end in itertools.pairwise(bounds)], 1)
    torch.testing.assert_close(module(u, cu_seqlens=cu_seqlens), alone, rtol=1e-4, atol=1e-5)
    seq_idx = torch.tensor([[4] * 17 + [7] + [4] * 42], dtype=torch.int32, device=device)
    torch.testing.assert_close(module(u, seq_idx=seq_idx), alone, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        cache = Cache()
        torch.testing.assert_close(
            module(u, cu_seqlens=cu_seqlens, inference_params=cache), alone, rtol=1e-4, atol=1e-5
        )
        assert [len(state) for state in cache.key_value_memory_dict[0]] == [4] * 4
        cache.seqlen_offset, token = 60, torch.randn(4, 1, 24, device=device)
        found = module(token, inference_params=cache)
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            whole = module(torch.cat([u[:, begin:end], token[row : row + 1]], 1))
            torch.testing.assert_close(found[row], whole[0, -1:], rtol=1e-4, atol=1e-5)


def test_wrong_packing(module, device):
    u = torch.randn(1, 6, 24, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 .*, got \[0, 4, 2\]"):
            module(u, cu_seqlens=torch.tensor([0, 4, 2]))
    with pytest.raises(ValueError, match="by cu_seqlens, not by seq_idx"):
        module(u, seq_idx=torch.zeros(1, 6, dtype=torch.int32, device=device), inference_params=Cache())


def test_a_norm_or_projection_with_hooks_or_replaced_is_called(module, device):
    u, expected, calls = torch.randn(2, 9, 24, device=device), None, []
    expected = module(u)
    for name, child in module.named_children():
        child.register_forward_hook(lambda *_, name=name: calls.append(name))
    torch.testing.assert_close(module(u), expected, rtol=1e-4, atol=1e-5)
    assert sorted(calls) == sorted(name for name, _ in module.named_children())


@torch.no_grad()
def test_dropout_or_a_bias_of_a_norm_counts(device):
    layer, u = Mamba3(24, d_state=8, headdim=8, device=device).train(), torch.randn(2, 9, 24, device=device)
    plain = layer(u)
    layer.B_norm.dropout_p = 0.5
    assert not torch.allclose(layer(u), plain)
    torch.testing.assert_close(layer.eval()(u), plain)
    layer.C_norm.bias = torch.nn.Parameter(torch.ones(8, device=device))
    assert not torch.allclose(layer(u), plain)


@torch.no_grad()
@pytest.mark.parametrize("hooked", [("B_norm",), ("norm",), ("C_norm", "norm")], ids="_".join)
def test_a_step_calls_a_norm_with_hooks(module, hooked, device):
    hooked, calls = [name for name in hooked if hasattr(module, name)], []
    u = torch.randn(3, 24, device=device)
    first, second = (module.allocate_inference_cache(3, 0) for _ in range(2))
    expected = [module.step(u.roll(step, 1), *first)[0] for step in range(3)]
    for name in hooked:
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    found = [module.step(u.roll(step, 1), *second)[0] for step in range(3)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)
    assert sorted(calls) == sorted(hooked * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_narrow_modules_and_autocast(module, dtype, device):
    u = torch.randn(2, 40, 24, device=device)
    expected = module(u)
    tolerance = {torch.float16: 0.01, torch.bfloat16: 0.08}[dtype] * expected.abs().max().item()
    with torch.autocast(device, dtype=dtype):
        out = module(u)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=tolerance)
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    narrow = copy.deepcopy(module).to(dtype)
    out = narrow(u.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=tolerance)
    cache = Cache()
    with torch.no_grad():
        narrow(u[:, :39].to(dtype), inference_params=cache)
        cache.seqlen_offset = 39
        step = narrow(u[:, 39:].to(dtype), inference_params=cache)
    assert [state.dtype for state in cache.key_value_memory_dict[0]] == [torch.float32, torch.float32, dtype, dtype]
    torch.testing.assert_close(step.float(), expected[:, 39:], rtol=0, atol=2 * tolerance)
