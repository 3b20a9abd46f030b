"""Mamba(bimamba_type=...), the layers of Vision Mamba, VideoMamba and SegMamba, against plain torch that flips."""

import functools

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import assert_close_to_truth, fixed_sum

from mamba_ssm import Mamba
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel, MixerModel
from mamba_ssm.modules._bimamba import parts_of
from mamba_ssm.ops.mamba_block import mamba_inner_ref
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.reference import plain_torch

SIZES = {"d_model": 20, "d_state": 5, "dt_rank": 3}
OF_UPSTREAM = ["A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight"]
OF_UPSTREAM += ["dt_proj.bias", "out_proj.weight"]


def of_direction(suffix):
    modules = ("conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias")
    return [f"A{suffix}_log", f"D{suffix}", *(name.replace(".", f"{suffix}.") for name in modules)]


def layer(device, **options):
    torch.manual_seed(0)
    made = Mamba(**SIZES, device=device, **options)
    for parameter in made.parameters():  # no two directions alike, nothing at zero or one
        parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter)
    return made


def by_flipping(state, x, kind, divide=False, nslices=5):
    """The forks' layer in plain torch."""

    def one(xz, suffix, A="A{}_log"):
        names = ("conv1d{}.weight", "conv1d{}.bias", "x_proj{}.weight", "dt_proj{}.weight")
        weights = [state[name.format(suffix)] for name in names]
        identity = torch.eye(weights[0].shape[0], dtype=xz.dtype, device=xz.device)
        A = -torch.exp(state[A.format(suffix)])
        rest = {"D": state[f"D{suffix}"], "delta_bias": state[f"dt_proj{suffix}.bias"]}
        return mamba_inner_ref(xz, *weights, identity, None, A, **rest).transpose(1, 2)

    xz = F.linear(x, state["in_proj.weight"]).transpose(1, 2)
    y = one(xz, "")
    if kind == "v1":  # all but A is shared, also the convolution, which looks back
        conv = F.conv1d(F.pad(xz.chunk(2, 1)[0], (3, 0)), state["conv1d.weight"], state["conv1d.bias"], groups=40)
        u = F.silu(conv)
        dt, B, C = F.linear(u.transpose(1, 2), state["x_proj.weight"]).split([3, 5, 5], -1)
        steps = u, F.linear(dt, state["dt_proj.weight"]).transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2)
        u, dt, B, C, z = (tensor.flip(-1) for tensor in (*steps, xz.chunk(2, 1)[1]))
        A = -torch.exp(state["A_b_log"])
        y = y + selective_scan_ref(u, dt, A, B, C, state["D"], z, state["dt_proj.bias"], True).flip(-1)
    else:
        y = y + one(xz.flip(-1), "_b").flip(-1)
    if kind == "v3":
        sliced = torch.stack(xz.chunk(nslices, dim=-1), dim=-1).flatten(-2)
        y = y + one(sliced, "_s").unflatten(-1, (-1, nslices)).transpose(-1, -2).flatten(-2)
    out = F.linear(y.transpose(1, 2) / (2 if divide else 1), state["out_proj.weight"])
    return out * state["gamma"] if "gamma" in state else out


def values_and_gradients(function, state, x, dtype):
    state = {name: value.detach().to(dtype).requires_grad_() for name, value in state.items()}
    x = x.detach().to(dtype).requires_grad_()
    out = function(state, x)
    leaves = {**state, "x": x}
    grads = torch.autograd.grad(fixed_sum(out), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


OPTIONS = [
    {"bimamba_type": "v1"},
    {"bimamba_type": "v2"},
    {"bimamba": True, "init_layer_scale": 0.3},
    {"bimamba_type": "v2", "if_divide_out": True},
    {"bimamba_type": "v2", "if_devide_out": True},
    {"bimamba_type": "v3"},
    {"bimamba_type": "v3", "nslices": 7, "init_layer_scale": 1e-5},
]


@pytest.mark.parametrize("fast", [True, False], ids=["one_node", "by_parts"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options, fast, device):
    module = layer(device, use_fast_path=fast, **options)
    x = torch.randn(2, 70, 20).to(device)
    divide = "if_divide_out" in options or "if_devide_out" in options
    plain = functools.partial(by_flipping, kind=module.bimamba_type, divide=divide, nslices=module.nslices)

    def ours(state, x):
        return torch.func.functional_call(module, state, (x,))

    state = dict(module.named_parameters())
    results = [values_and_gradients(f, state, x, torch.float32) for f in (ours, plain)]
    assert_close_to_truth(*results, values_and_gradients(plain, state, x, torch.float64), atol=1e-4)


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_autocast(kind, device):
    module, x = layer(device, bimamba_type=kind), torch.randn(2, 40, 20).to(device)
    expected = module(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = module(x)
        assert found.dtype == torch.bfloat16
        found.float().square().sum().backward()
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("kind", ["v1", "v2", "v3"])
def test_plain_torch(kind):
    module, x = layer("cpu", bimamba_type=kind), torch.randn(2, 40, 20)
    with plain_torch():
        found = module(x)
    torch.testing.assert_close(found, by_flipping(module.state_dict(), x, kind), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["v1", "v2", "v3"])
def test_compiled(kind, device):
    module, x = layer(device, bimamba_type=kind), torch.randn(2, 40, 20).to(device)
    expected = module(x)
    torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), expected)


def test_operator(device):
    module = layer(device, bimamba_type="v2")
    xz = torch.randn(2, 80, 40).to(device)
    directions = [*parts_of(module).parameters(), *parts_of(module, "_b").parameters()]
    arguments = [xz, module.out_proj.weight, None, *directions, False]
    arguments = [
        tensor.detach().requires_grad_() if isinstance(tensor, torch.Tensor) else tensor for tensor in arguments
    ]
    torch.library.opcheck(torch.ops.mamba_ssm.mamba_inner_both.default, tuple(arguments))


def test_a_hook_is_called(device):
    module, x = layer(device, bimamba_type="v2"), torch.randn(2, 30, 20).to(device)
    expected, seen = module(x), []
    for name in ("conv1d_b", "x_proj_b", "dt_proj_b"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
    assert seen == ["conv1d_b", "x_proj_b", "dt_proj_b"]


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_packed_sequences_do_not_see_each_other(kind, device):
    module, x = layer(device, bimamba_type=kind), torch.randn(2, 30, 20).to(device)
    seq_idx = (torch.arange(30) >= 13).int().expand(2, 30).contiguous().to(device)
    apart = torch.cat([module(x[:, :13]), module(x[:, 13:])], dim=1)
    torch.testing.assert_close(module(x, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)


def test_state_dicts_of_the_forks():
    """Their names, no more and no less."""
    names = {kind: set(Mamba(16, bimamba_type=kind).state_dict()) for kind in ("none", "v1", "v2", "v3")}
    assert names["none"] == set(OF_UPSTREAM)
    assert names["v1"] == {*OF_UPSTREAM, "A_b_log"}
    assert names["v2"] == {*OF_UPSTREAM, *of_direction("_b")}
    assert names["v3"] == {*OF_UPSTREAM, *of_direction("_b"), *of_direction("_s")}
    assert set(Mamba(16, bimamba=True, init_layer_scale=0.5).state_dict()) == {*names["v2"], "gamma"}


def test_the_same_seed_gives_the_same_forward_direction():
    layers = []
    for kind in ("none", "v2"):
        torch.manual_seed(3)
        layers.append(Mamba(16, bimamba_type=kind).state_dict())
    assert all(torch.equal(layers[0][name], layers[1][name]) for name in OF_UPSTREAM)


def test_models():
    """An encoder is built by ssm_cfg; a language model of such layers does not generate."""
    tokens = torch.randint(0, 32, (2, 12))
    ssm_cfg = {"bimamba_type": "v2", "d_state": 4}
    encoder = MixerModel(16, 2, 0, 32, ssm_cfg=ssm_cfg)
    hidden = encoder(tokens)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    assert not torch.equal(encoder(changed)[:, 0], hidden[:, 0])  # the first step sees the last
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=32, ssm_cfg=ssm_cfg))
    assert model(tokens).logits.shape == (2, 12, 32)
    with pytest.raises(ValueError, match="not causal"):
        model.generate(tokens, max_length=14)


def test_no_decoding():
    module, x = Mamba(16, bimamba_type="v2", layer_idx=0), torch.randn(1, 1, 16)
    state = torch.zeros(1, 32, 4), torch.zeros(1, 32, 16)
    for call in (
        functools.partial(module, x, inference_params=InferenceParams(8, 1)),
        functools.partial(module.step, x, *state),
        functools.partial(module.allocate_inference_cache, 1, 8),
    ):
        with pytest.raises(ValueError, match="bimamba_type='v2' is not causal"):
            call()


def test_a_scaled_layer_decodes():
    module, x = Mamba(16, init_layer_scale=0.5, layer_idx=0), torch.randn(2, 3, 16)
    conv_state, ssm_state = module.allocate_inference_cache(2, 3)
    steps = [module.step(x[:, t : t + 1], conv_state, ssm_state)[0] for t in range(3)]
    torch.testing.assert_close(torch.cat(steps, dim=1), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"bimamba_type": "v4"}, "bimamba_type must be one of 'none', 'v1', 'v2', 'v3', got 'v4'"),
        ({"bimamba_type": None}, "bimamba_type must be one of .*, got None"),
        ({"bimamba_type": "v3", "bimamba": True}, "bimamba=True is bimamba_type='v2', got also 'v3'"),
        ({"bimamba": "yes"}, "bimamba must be True or False"),
        ({"bimamba_type": "v3", "nslices": 0}, "nslices must be a positive integer, got 0"),
        ({"init_layer_scale": "small"}, "init_layer_scale must be a number"),
    ],
    ids=str,
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba(16, **options)


def test_slices_need_lengths_that_they_divide():
    module, x = Mamba(16, bimamba_type="v3", nslices=4), torch.randn(1, 10, 16)
    with pytest.raises(ValueError, match="multiple of nslices = 4, got 10"):
        module(x)
    with pytest.raises(ValueError, match="takes no seq_idx"):
        module(x[:, :8], seq_idx=torch.zeros(1, 8, dtype=torch.int32))
