"""BiMamba2 and Hydra against plain torch that flips, in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import assert_close_to_truth, fixed_sum

from mamba_ssm import BiMamba2, Hydra, Mamba2
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel, MixerModel
from mamba_ssm.ops.norm import gated_rms_norm_ref
from mamba_ssm.ops.ssd import ssd_chunk_scan_combined_ref
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_ref
from mamba_ssm.utils.generation import InferenceParams

WIDTH, HEADDIM = 24, 8
SIZES = {"d_model": WIDTH, "d_state": 16, "headdim": HEADDIM}


def layer(cls, device, **options):
    torch.manual_seed(0)
    made = cls(**{**SIZES, **options}, device=device)
    for parameter in made.parameters():  # no two directions alike, nothing at zero or one
        parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter)
    return made


def bimamba2_by_flipping(module, state, u):
    def one(prefix, u):
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        in_proj = own.get("in_proj.weight", state["in_proj.weight"])
        D = own["D"].view(-1, HEADDIM) if module.D_has_hdim else own["D"]
        return mamba_split_conv1d_scan_ref(
            F.linear(u, in_proj),
            own["conv1d.weight"].squeeze(1),
            own["conv1d.bias"],
            own["dt_bias"],
            -torch.exp(own["A_log"]),
            D,
            64,
            dt_limit=module.dt_limit,
            rmsnorm_weight=own.get("norm.weight"),
            rmsnorm_eps=1e-5,
            headdim=HEADDIM,
            ngroups=module.ngroups,
            norm_before_gate=module.norm_before_gate,
        )

    y, y_b = one("", u), one("backwards.", u.flip(1)).flip(1)
    if module.combine == "gate":
        gate = torch.sigmoid(F.linear(u, state["gate_proj.weight"], state["gate_proj.bias"]))
        gate = gate.repeat_interleave(HEADDIM, dim=-1)
        y, y_b = gate * y, (1 - gate) * y_b
    return F.linear(y + y_b, state["out_proj.weight"])


def hydra_by_flipping(module, state, u):
    channels, matrices, heads = 2 * WIDTH, 2 * module.ngroups * 16, 2 * WIDTH // HEADDIM
    z, xBC, dt = F.linear(u, state["in_proj.weight"]).split([channels, channels + 2 * matrices, 2 * heads], -1)
    weight = state["conv1d.weight"]
    xBC = F.conv1d(xBC.mT, weight, state["conv1d.bias"], groups=len(weight), padding=weight.shape[-1] // 2).mT
    x, *BC = F.silu(xBC).split([channels, matrices, matrices], -1)

    def scan(x, dt, BC):
        B, C = BC.unflatten(-1, (2, module.ngroups, 16)).unbind(2)
        A, bias = -torch.exp(state["A_log"]), {"dt_bias": state["dt_bias"], "dt_softplus": True}
        y = ssd_chunk_scan_combined_ref(x.unflatten(-1, (heads, HEADDIM)), dt, A, B, C, None, **bias).flatten(2)
        return torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)

    y = scan(x, dt[..., :heads], BC[0]) + scan(x.flip(1), dt[..., heads:].flip(1), BC[1].flip(1)).flip(1)
    y = y + x * (state["D"] + F.linear(x, state["fc_D.weight"])).repeat_interleave(HEADDIM, dim=-1)
    group = channels // module.ngroups
    return F.linear(gated_rms_norm_ref(y, state["norm.weight"], None, z, 1e-5, group, True), state["out_proj.weight"])


def values_and_gradients(function, state, u, dtype):
    state = {name: value.detach().to(dtype).requires_grad_() for name, value in state.items()}
    leaves = {**state, "u": u.detach().to(dtype).requires_grad_()}
    out = function(state, leaves["u"])
    grads = torch.autograd.grad(fixed_sum(out), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


LAYERS = [
    (BiMamba2, {}),
    (BiMamba2, {"shared_proj": False}),
    (BiMamba2, {"combine": "gate", "ngroups": 2}),
    (BiMamba2, {"combine": "gate", "shared_proj": False, "rmsnorm": False}),
    (BiMamba2, {"use_mem_eff_path": False, "D_has_hdim": True}),
    (BiMamba2, {"norm_before_gate": True, "d_conv": 3, "dt_limit": (0.01, 0.5)}),
    (Hydra, {}),
    (Hydra, {"d_conv": 3, "ngroups": 3}),
]
REFERENCES = {BiMamba2: bimamba2_by_flipping, Hydra: hydra_by_flipping}


@pytest.mark.parametrize("seqlen", [1, 2, 77])
@pytest.mark.parametrize("cls,options", LAYERS, ids=str)
def test_values_and_gradients(cls, options, seqlen, device):
    module, u = layer(cls, device, **options), torch.randn(2, seqlen, WIDTH).to(device)

    def ours(state, u):
        return torch.func.functional_call(module, state, (u,))

    plain = functools.partial(REFERENCES[cls], module)
    state = dict(module.named_parameters())
    results = [values_and_gradients(f, state, u, torch.float32) for f in (ours, plain)]
    assert_close_to_truth(*results, values_and_gradients(plain, state, u, torch.float64), atol=1e-4)


@pytest.mark.parametrize("cls", [BiMamba2, Hydra])
def test_autocast(cls, device):
    module, u = layer(cls, device), torch.randn(2, 40, WIDTH).to(device)
    expected = module(u)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = module(u)
        found.float().square().sum().backward()
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("cls,options", [(BiMamba2, {"combine": "gate"}), (Hydra, {})], ids=str)
def test_compiled(cls, options, device):
    module, u = layer(cls, device, **options), torch.randn(2, 40, WIDTH).to(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(u), module(u))


def test_packed_sequences_do_not_see_each_other(device):
    module, u = layer(BiMamba2, device), torch.randn(1, 30, WIDTH).to(device)
    bounds = torch.tensor([0, 13, 30], dtype=torch.int32, device=device)
    seq_idx = (torch.arange(30) >= 13).int()[None].to(device)
    apart = torch.cat([module(u[:, :13]), module(u[:, 13:])], dim=1)
    for packed in ({"seq_idx": seq_idx}, {"cu_seqlens": bounds}):
        torch.testing.assert_close(module(u, **packed), apart, rtol=1e-4, atol=1e-5)
    module.use_mem_eff_path = module.backwards.use_mem_eff_path = False
    torch.testing.assert_close(module(u, seq_idx=seq_idx), apart, rtol=1e-4, atol=1e-5)


def test_parameters_have_the_names_of_mamba2():
    of_mamba2 = {name: p.shape for name, p in Mamba2(**SIZES).named_parameters()}
    names = {name: p.shape for name, p in BiMamba2(**SIZES, shared_proj=False, combine="gate").named_parameters()}
    backwards = {name.removeprefix("backwards."): names.pop(name) for name in list(names) if "backwards" in name}
    gate = {name: names.pop(name) for name in list(names) if "gate_proj" in name}
    assert names == of_mamba2 and len(gate) == 2
    assert backwards == {name: shape for name, shape in of_mamba2.items() if "out_proj" not in name}
    assert set(dict(Hydra(**SIZES).named_parameters())) == {*of_mamba2, "fc_D.weight"}


@pytest.mark.parametrize("cls", [BiMamba2, Hydra])
def test_models(cls):
    tokens = torch.randint(0, 32, (2, 12))
    ssm_cfg = {"layer": cls.__name__, "d_state": 8, "headdim": 8}
    encoder = MixerModel(16, 2, 0, 32, ssm_cfg=ssm_cfg)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    assert not torch.equal(encoder(changed)[:, 0], encoder(tokens)[:, 0])  # the first step sees the last
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=32, ssm_cfg=ssm_cfg))
    with pytest.raises(ValueError, match=f"{cls.__name__}: the layer is not causal"):
        model.generate(tokens, max_length=14)
    with pytest.raises(ValueError, match="not causal"):
        cls(**SIZES, layer_idx=0)(torch.randn(1, 1, WIDTH), inference_params=InferenceParams(8, 1))


@pytest.mark.parametrize(
    "cls,options,message",
    [
        (BiMamba2, {"combine": "mean"}, "combine must be 'sum' or 'gate', got 'mean'"),
        (BiMamba2, {"shared_proj": "yes"}, "shared_proj must be True or False"),
        (BiMamba2, {"d_conv": 7}, "d_conv must be an integer from 2 to 4, got 7"),
        (Hydra, {"d_conv": 4}, "d_conv must be odd, .* got 4"),
        (Hydra, {"headdim": 7}, "multiple of headdim"),
    ],
    ids=str,
)
def test_wrong_arguments(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**{**SIZES, **options})
