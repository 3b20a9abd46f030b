"""The Mamba block: upstream's state dict, both paths, inference cache, autocast, and that it learns."""

import copy
import math

import pytest
import torch
from _helpers.cases import assert_all_close, dtype_id, grads_of

from mamba_ssm import Mamba

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Cache:
    """What Mamba needs of upstream's InferenceParams."""

    def __init__(self):
        self.key_value_memory_dict = {}
        self.seqlen_offset = 0


def test_state_dict_has_upstreams_names_and_shapes():
    module = Mamba(32, d_state=8, d_conv=3, expand=2, bias=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "A_log": (64, 8),
        "D": (64,),
        "in_proj.weight": (128, 32),
        "in_proj.bias": (128,),
        "conv1d.weight": (64, 1, 3),
        "conv1d.bias": (64,),
        "x_proj.weight": (2 + 16, 64),
        "dt_proj.weight": (64, 2),
        "dt_proj.bias": (64,),
        "out_proj.weight": (32, 64),
        "out_proj.bias": (32,),
    }
    lean = Mamba(32, conv_bias=False).state_dict()
    assert not {"in_proj.bias", "conv1d.bias", "out_proj.bias"} & lean.keys()
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    module.load_state_dict(checkpoint, strict=True)
    assert torch.equal(module.x_proj.weight, checkpoint["x_proj.weight"])


def test_initialisation():
    module = Mamba(48, dt_min=0.01, dt_max=0.2)
    assert module.dt_rank == math.ceil(48 / 16)
    assert torch.equal(module.A_log[5], torch.log(torch.arange(1, 17).float()))
    dt = torch.nn.functional.softplus(module.dt_proj.bias)
    assert dt.min() >= 0.0099 and dt.max() <= 0.2001
    assert module.D.eq(1).all()
    assert module.A_log._no_weight_decay and module.D._no_weight_decay and module.dt_proj.bias._no_reinit
    half = Mamba(48, dtype=torch.bfloat16)
    assert half.in_proj.weight.dtype == torch.bfloat16
    assert half.A_log.dtype == half.D.dtype == torch.float32
    with pytest.raises(ValueError, match="dt_init must be 'random' or 'constant', got 'ones'"):
        Mamba(16, dt_init="ones")
    with pytest.raises(ValueError, match="d_conv must be an integer from 2 to 4, got 5"):
        Mamba(16, d_conv=5)
    with pytest.raises(ValueError, match=r"d_state must be an integer from 1 to 256, got 257"):
        Mamba(16, d_state=257)
    for dt_rank in (0, "all"):
        with pytest.raises(ValueError, match="dt_rank \\(unless 'auto'\\) must be a positive integer, got"):
            Mamba(16, dt_rank=dt_rank)
    with pytest.raises(ValueError, match=r"dt_min and dt_max must be positive, .* got 0, 0\.1 and 0\.0001"):
        Mamba(16, dt_min=0)


@pytest.mark.parametrize("d_model,shape", [(256, (1, 512, 256)), (512, (1, 100, 512))], ids=["256", "512"])
def test_readme_sizes(d_model, shape, device):
    module = Mamba(d_model=d_model, d_state=16, d_conv=4, expand=2).to(device)
    x = torch.randn(*shape, device=device)
    out = module(x)
    assert out.shape == x.shape
    assert out.isfinite().all()
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"conv_bias": False, "d_conv": 2}, {"d_state": 5}], ids=str)
def test_fast_and_slow_path_agree(options, device):
    module = Mamba(24, **options).to(device)
    x = torch.randn(3, 37, 24, device=device)
    fast = grads_of(module, x, module.parameters())
    module.use_fast_path = False
    assert_all_close(fast, grads_of(module, x, module.parameters()), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_low_precision_parameters(fast, dtype, device):
    if device == "cpu" and dtype == torch.float16 and TORCH < (2, 3):
        pytest.skip("torch before 2.3 has no float16 matrix product on the CPU")
    module = Mamba(24, use_fast_path=fast).to(device)
    x = torch.randn(2, 33, 24, device=device)
    expected = module(x)
    narrow = copy.deepcopy(module).to(dtype)
    narrow.A_log.data, narrow.D.data = module.A_log.data, module.D.data
    out = narrow(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_autocast(fast, device):
    module = Mamba(24, use_fast_path=fast).to(device)
    x = torch.randn(2, 33, 24, device=device)
    expected = grads_of(module, x, module.parameters())
    with torch.autocast(device, dtype=torch.bfloat16):
        out = module(x)
        assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().square().sum(), list(module.parameters()))
    assert all(grad.dtype == torch.float32 for grad in found)
    for ours, theirs in zip(found, expected[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1 * theirs.abs().max().item())


def test_packed_sequences_do_not_see_each_other(device):
    module = Mamba(24).to(device)
    x = torch.randn(1, 50, 24, device=device)
    seq_idx = torch.tensor([0] * 13 + [1] * 37, dtype=torch.int32, device=device)[None]
    apart = torch.cat([module(x[:, :13]), module(x[:, 13:])], dim=1)
    torch.testing.assert_close(module(x, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefill", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_prefill_then_steps_equal_one_forward(prefill, dtype, device):
    module = Mamba(24, layer_idx=3, bias=True, dtype=dtype).to(device)
    x = torch.randn(2, 30, 24, device=device, dtype=dtype)
    cache = Cache()
    with torch.no_grad():
        whole = module(x)
        parts = [module(x[:, :prefill], inference_params=cache)]
        for t in range(prefill, 30):
            cache.seqlen_offset = t
            parts.append(module(x[:, t : t + 1], inference_params=cache))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=tolerance, atol=tolerance)
    conv_state, ssm_state = cache.key_value_memory_dict[3]
    assert conv_state.shape == (2, 48, 4) and ssm_state.shape == (2, 48, 16)


def test_step_by_itself_with_gradients_on(device):
    module = Mamba(24).to(device)
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


class CopyModel(torch.nn.Module):
    """Embedding, two Mamba blocks with residuals and norms, and a head."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.blocks = torch.nn.ModuleList(Mamba(width) for _ in range(2))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_learns_to_copy(cast, device):
    """200 steps: read 4 tokens, then repeat them on 4 blanks. Guessing costs log(8) = 2.08; it must fall below 0.5."""
    torch.manual_seed(1)
    model = CopyModel(9, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(200):
        tokens = torch.randint(1, 9, (32, 4), generator=generator).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
            logits = model(torch.cat([tokens, torch.zeros_like(tokens)], dim=1))[:, 4:]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.9
    assert sum(losses[-10:]) / 10 < 0.5, losses[::20]


def test_cache_of_another_batch(device):
    block = Mamba(16, layer_idx=0, device=device)
    params = Cache()
    params.key_value_memory_dict[0] = block.allocate_inference_cache(4, 8)
    with pytest.raises(ValueError, match="batch of 4, got a batch of 1"):
        block(torch.randn(1, 5, 16, device=device), inference_params=params)
