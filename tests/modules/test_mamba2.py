"""The Mamba-2 block: upstream's state dict, both paths, packed sequences, inference cache, autocast."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import assert_all_close, dtype_id, grads_of

from mamba_ssm import Mamba2
from mamba_ssm.ops.norm import GatedRMSNorm
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_ref
from mamba_ssm.utils.reference import plain_torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Cache:
    """What Mamba2 needs of upstream's InferenceParams."""

    def __init__(self):
        self.key_value_memory_dict = {}
        self.seqlen_offset = 0


def small(**options):
    return Mamba2(24, **{"d_state": 16, "headdim": 8, **options})


def reference(module, x, **options):
    """The block by plain torch."""
    return mamba_split_conv1d_scan_ref(
        module.in_proj(x),
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        module.dt_bias,
        -torch.exp(module.A_log.float()),
        module.D.view(module.nheads, -1) if module.D_has_hdim else module.D,
        64,
        dt_limit=module.dt_limit,
        rmsnorm_weight=module.norm.weight if module.rmsnorm else None,
        rmsnorm_eps=1e-5,
        outproj_weight=module.out_proj.weight,
        outproj_bias=module.out_proj.bias,
        headdim=module.headdim,
        ngroups=module.ngroups,
        norm_before_gate=module.norm_before_gate,
        **options,
    )


def test_state_dict_has_upstreams_names_and_shapes():
    module = Mamba2(32, d_state=8, d_conv=3, headdim=16, ngroups=2, bias=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "dt_bias": (4,),
        "A_log": (4,),
        "D": (4,),
        "in_proj.weight": (2 * 64 + 2 * 2 * 8 + 4, 32),
        "in_proj.bias": (2 * 64 + 2 * 2 * 8 + 4,),
        "conv1d.weight": (64 + 2 * 2 * 8, 1, 3),
        "conv1d.bias": (64 + 2 * 2 * 8,),
        "norm.weight": (64,),
        "out_proj.weight": (32, 64),
        "out_proj.bias": (32,),
    }
    lean = Mamba2(32, headdim=16, conv_bias=False, rmsnorm=False, D_has_hdim=True, d_ssm=32).state_dict()
    assert not {"in_proj.bias", "conv1d.bias", "out_proj.bias", "norm.weight"} & lean.keys()
    assert lean["D"].shape == (32,) and lean["A_log"].shape == (2,)
    assert lean["in_proj.weight"].shape == (2 * 64 + 2 * 128 + 2, 32)
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    module.load_state_dict(checkpoint, strict=True)
    assert torch.equal(module.out_proj.weight, checkpoint["out_proj.weight"])


def test_initialisation():
    module = Mamba2(512, dt_min=0.01, dt_max=0.2, conv_init=0.01, A_init_range=(2, 3))
    dt = F.softplus(module.dt_bias)
    assert dt.min() >= 0.0099 and dt.max() <= 0.2001
    assert module.A_log.exp().min() >= 2 and module.A_log.exp().max() <= 3.0001
    assert module.D.eq(1).all() and module.conv1d.weight.abs().max() <= 0.01
    assert module.A_log._no_weight_decay and module.D._no_weight_decay and module.dt_bias._no_weight_decay
    assert module.dt_bias._no_reinit
    half = small(dtype=torch.bfloat16)
    assert half.in_proj.weight.dtype == half.A_log.dtype == half.norm.weight.dtype == torch.bfloat16
    assert half.D.dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert small().A_log.dtype == small().D.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"d_conv": 5}, "d_conv must be an integer from 2 to 4, got 5"),
        ({"d_state": 257}, r"d_state must be an integer from 1 to 256, got 257"),
        ({"headdim": 512}, r"headdim must be an integer from 1 to 256, got 512"),
        ({"headdim": 7}, r"must be a multiple of headdim \(7\), got 48"),
        ({"ngroups": 4}, "ngroups must divide the 6 heads, got 4"),
        ({"d_ssm": 96}, "d_ssm must be at most expand . d_model = 48, got 96"),
        ({"d_ssm": 20}, r"must be a multiple of headdim \(8\), got 20"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer, got 0"),
        ({"A_init_range": (0, 1)}, r"A_init_range must be two positive, finite numbers in order, got \(0, 1\)"),
    ],
    ids=str,
)
def test_sizes_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("d_model,options", [(512, {}), (250, {"headdim": 25, "ngroups": 10})], ids=["512", "250"])
def test_sizes_that_must_work(d_model, options, device):
    module = Mamba2(d_model, **options).to(device)
    x = torch.randn(1, 1024 if d_model == 512 else 101, d_model, device=device)
    out = module(x)
    assert out.shape == x.shape
    assert out.isfinite().all()
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


OPTIONS = [
    {},
    {"bias": True, "ngroups": 2},
    {"conv_bias": False, "d_conv": 2, "norm_before_gate": True, "ngroups": 3},
    {"rmsnorm": False, "D_has_hdim": True},
    {"d_ssm": 32, "ngroups": 2, "dt_limit": (0.05, 0.1)},
    {"d_ssm": 16, "rmsnorm": False, "bias": True, "d_state": 5},
]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_the_reference(options, fast, device):
    module = small(use_mem_eff_path=fast, **options).to(device)
    torch.nn.init.normal_(module.D)
    x = torch.randn(3, 37, 24, device=device)
    parameters = list(module.parameters())
    found = grads_of(module, x, parameters)
    assert_all_close(found, grads_of(lambda x: reference(module, x), x, parameters), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_low_precision_parameters(fast, dtype, device):
    if device == "cpu" and dtype == torch.float16 and TORCH < (2, 3):
        pytest.skip("torch before 2.3 has no float16 matrix product on the CPU")
    module = small(use_mem_eff_path=fast).to(device, dtype)
    x = torch.randn(2, 33, 24, device=device, dtype=dtype)
    out = module(x)
    assert out.dtype == dtype
    expected = copy.deepcopy(module).float()(x.float())
    # a handful of roundings to dtype between x and out, whose values are about 1
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_autocast(fast, device):
    module = small(use_mem_eff_path=fast).to(device)
    x = torch.randn(2, 33, 24, device=device)
    parameters = list(module.parameters())
    expected = grads_of(module, x, parameters)[2:]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = module(x)
        assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().square().sum(), parameters)
    assert all(grad.dtype == torch.float32 for grad in found)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1 * theirs.abs().max().item())


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_packed_sequences_equal_separate_ones(fast, device):
    module = small(use_mem_eff_path=fast).to(device)
    x = torch.randn(1, 50, 24, device=device)
    bounds = [0, 13, 13, 14, 50]
    parts = [x[:, start:end] for start, end in itertools.pairwise(bounds) if end > start]
    apart = torch.cat([module(part) for part in parts], dim=1)
    seq_idx = torch.tensor([0] * 13 + [2] + [3] * 36, dtype=torch.int32, device=device)[None]
    torch.testing.assert_close(module(x, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = torch.tensor(bounds, dtype=dtype, device=device)
        torch.testing.assert_close(module(x, cu_seqlens=cu_seqlens), apart, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="packed in a batch of 1, got a batch of 2"):
        module(x.expand(2, -1, -1), cu_seqlens=cu_seqlens)
    torch.testing.assert_close(module(x, seq_idx=seq_idx, cu_seqlens=cu_seqlens), apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_flattened_batch(fast, device):
    module = small(use_mem_eff_path=fast).to(device)
    x = torch.randn(3, 11, 24, device=device)
    torch.testing.assert_close(module(x.flatten(0, 1), seqlen=11), module(x).flatten(0, 1))


STEP_OPTIONS = [{}, {"rmsnorm": False, "D_has_hdim": True}, {"d_ssm": 32, "ngroups": 2, "dt_limit": (0.05, 0.1)}]


@pytest.mark.parametrize("options", STEP_OPTIONS, ids=str)
@pytest.mark.parametrize("prefill", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_prefill_then_steps_equal_one_forward(prefill, dtype, options, device):
    module = small(layer_idx=3, bias=True, dtype=dtype, **options).to(device)
    x = torch.randn(2, 30, 24, device=device, dtype=dtype)
    cache = Cache()
    with torch.no_grad():
        whole = module(x)
        parts = [module(x[:, :prefill], inference_params=cache)]
        for t in range(prefill, 30):
            cache.seqlen_offset = t
            parts.append(module(x[:, t : t + 1], inference_params=cache))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # the state is bfloat16 too
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=tolerance, atol=tolerance)
    conv_state, ssm_state = cache.key_value_memory_dict[3]
    assert conv_state.shape == (2, module.conv1d.weight.shape[0], 4)
    assert ssm_state.shape == (2, module.nheads, 8, 16)


@pytest.mark.parametrize("change", [{"group_size": 8}, {"norm_before_gate": True}], ids=str)
def test_a_norm_put_in_its_place_keeps_its_options(change, device):
    module = small().to(device)
    x = torch.randn(2, 3, 24, device=device)
    usual = module(x)
    options = {"group_size": module.norm.group_size, "norm_before_gate": False, **change}
    module.norm = GatedRMSNorm(module.d_ssm, **options, device=device)
    states = module.allocate_inference_cache(2, 100)
    steps = [module.step(x[:, t : t + 1], *states)[0] for t in range(3)]
    forward = module(x)
    with plain_torch():
        expected = module(x)
    assert not torch.allclose(usual, expected)
    torch.testing.assert_close(forward, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_packed_prefill_then_steps(device):
    module = small(layer_idx=0).to(device)
    lengths, total = [9, 2, 5], 14
    rows = [torch.randn(total, 24, device=device) for _ in lengths]
    cu_seqlens = torch.tensor([0, 9, 11, 16], dtype=torch.int32, device=device)
    cache = Cache()
    with torch.no_grad():
        packed = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])[None]
        found = list(module(packed, cu_seqlens=cu_seqlens, inference_params=cache)[0].split(lengths))
        cache.seqlen_offset = 1
        for step in range(5):
            u = torch.stack([row[length + step] for row, length in zip(rows, lengths, strict=True)])[:, None]
            out = module(u, inference_params=cache)[:, 0]
            found = [torch.cat([before, now[None]]) for before, now in zip(found, out, strict=True)]
        for row, length, ours in zip(rows, lengths, found, strict=True):
            torch.testing.assert_close(ours, module(row[None, : length + 5])[0], rtol=1e-4, atol=1e-5)


def test_step_by_itself_with_gradients_on(device):
    module = small().to(device)
    x = torch.randn(2, 5, 24, device=device)
    conv_state, ssm_state = module.allocate_inference_cache(2, 100)
    steps = [module.step(x[:, t : t + 1], conv_state, ssm_state)[0] for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), module(x), rtol=1e-4, atol=1e-5)
    assert not steps[0].requires_grad
    wide, states = module.allocate_inference_cache(4, 100, dtype=torch.float16)
    assert wide.dtype == states.dtype == torch.float16
    with pytest.raises(ValueError, match=r"a step takes one token, \(B, 1, d_model\), got \(2, 5, 24\)"):
        module.step(x, conv_state, ssm_state)
    with pytest.raises(ValueError, match="layer_idx must be given"):
        module(x, inference_params=Cache())


def test_packed_prompts_come_first():
    cache, bounds = Cache(), torch.tensor([0, 2, 5], dtype=torch.int32)
    cache.seqlen_offset = 5
    with pytest.raises(ValueError, match="cu_seqlens is for the first call with inference_params"):
        small(layer_idx=0)(torch.randn(1, 5, 24), cu_seqlens=bounds, inference_params=cache)


def test_cache_of_another_batch(device):
    module = small(layer_idx=0, device=device)
    cache = Cache()
    cache.key_value_memory_dict[0] = module.allocate_inference_cache(4, 8)
    with pytest.raises(ValueError, match="batch of 4, got a batch of 1"):
        module(torch.randn(1, 5, 24, device=device), inference_params=cache)
