"""FLOPs that torch's counter sees: those of plain torch's products where an operator is products, and no more."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mamba_ssm import BiMamba2, Hydra, Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_ssm._torch import flops
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from mamba_ssm.utils.flops import register_flops

register_flops()
BATCH, CHUNKS, WIDTH = 2, 3, 64
LENGTH = CHUNKS * flops.CHUNK


def counted(function, *arguments, **options):
    with FlopCounterMode(display=False) as counter:
        function(*arguments, **options)
    return counter.get_total_flops()


def matrix_form(nheads, headdim, ngroups, dstate, rank=1):
    """A scan of LENGTH steps as products of plain torch, of chunks of CHUNK rows; a step has a row a rank."""
    heads, groups = (BATCH * CHUNKS * rank * count for count in (nheads, ngroups))
    x = torch.randn(heads, flops.CHUNK, headdim)
    B, C = torch.randn(2, groups, flops.CHUNK, dstate)
    torch.bmm(C, B.mT)
    B, C = (matrix.repeat_interleave(nheads // ngroups, dim=0) for matrix in (B, C))
    torch.bmm(torch.randn(heads, flops.CHUNK, flops.CHUNK), x)
    state = torch.bmm(B.mT, x)
    torch.bmm(C, state)


def test_every_operator_has_a_formula():
    schemas = Path(__file__).parents[1] / "_torch" / "schemas.txt"
    names = {line.partition("(")[0].removeprefix("mamba_ssm::") for line in schemas.read_text().splitlines()}
    assert {name.removesuffix("_backward") for name in names} == set(flops.FORMULAS)


@pytest.mark.parametrize(("nheads", "headdim", "ngroups", "dstate"), [(4, 8, 1, 16), (4, 16, 2, 8), (2, 8, 2, 32)])
def test_ssd_is_its_matrix_form(nheads, headdim, ngroups, dstate):
    x = torch.randn(BATCH, LENGTH, nheads, headdim)
    B, C = torch.randn(2, BATCH, LENGTH, ngroups, dstate)
    dt, A = torch.rand(BATCH, LENGTH, nheads), -torch.rand(nheads)
    expected = counted(matrix_form, nheads, headdim, ngroups, dstate)
    assert counted(mamba_chunk_scan_combined, x, dt, A, B, C, chunk_size=32) == expected


def test_mamba3_is_its_matrix_form():
    nheads, headdim, dstate = 4, 8, 16
    Q, K = torch.randn(2, BATCH, LENGTH, 1, dstate)
    V = torch.randn(BATCH, LENGTH, nheads, headdim)
    ADT, DT, Trap = -torch.rand(BATCH, nheads, LENGTH), *torch.rand(2, BATCH, nheads, LENGTH)
    Q_bias, K_bias = torch.randn(2, nheads, dstate)
    Angles = torch.randn(BATCH, LENGTH, nheads, dstate // 2)
    found = counted(mamba3_siso_combined, Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles)
    assert found == counted(matrix_form, nheads, headdim, nheads, dstate)  # each head has B and C of its own


def test_mimo_takes_its_rank_times_siso():
    def scan(**options):
        layer = Mamba3(WIDTH, headdim=16, d_state=32, chunk_size=16, **options)
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(BATCH, LENGTH, WIDTH))
        return counter.flop_counts["Global"][torch.ops.mamba_ssm.mamba3_block]

    assert scan(is_mimo=True, mimo_rank=4) == 4 * scan()


def test_selective_scan():
    u, delta = torch.rand(2, BATCH, WIDTH, LENGTH)
    B, C = torch.randn(2, BATCH, 16, LENGTH)
    expected = 9 * BATCH * LENGTH * WIDTH * 16
    assert counted(selective_scan_fn, u, delta, -torch.rand(WIDTH, 16), B, C) == expected


@pytest.mark.parametrize(("heads", "each"), [((), 9), ((4,), 4)], ids=["channels", "heads"])
def test_one_step(heads, each):
    state = torch.zeros(BATCH, *heads, 8, 16)
    x, dt = torch.rand(2, BATCH, *heads, 8)
    B, C = torch.randn(2, BATCH, *(1 for _ in heads), 16)
    found = counted(selective_state_update, state, x, dt, -torch.rand(*heads, 8, 16), B, C)
    assert found == each * state.numel()


LAYERS = {
    "Mamba": (Mamba, {}),
    "v1": (Mamba, {"bimamba_type": "v1"}),
    "both directions": (Mamba, {"bimamba_type": "v2"}),
    "three directions": (Mamba, {"bimamba_type": "v3", "nslices": 5}),
    "BiMamba2": (BiMamba2, {"headdim": 16, "d_state": 32}),
    "Hydra": (Hydra, {"headdim": 16, "d_state": 32}),
    "Mamba2": (Mamba2, {"headdim": 16, "d_state": 32}),
    "Mamba3": (Mamba3, {"headdim": 16, "d_state": 32}),
    "Mamba3 MIMO": (Mamba3, {"headdim": 16, "d_state": 32, "is_mimo": True, "mimo_rank": 2, "chunk_size": 16}),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_training_step_is_three_times_its_forward(layer):
    kind, options = LAYERS[layer]
    layer = kind(WIDTH, **options)
    x = torch.randn(BATCH, 50, WIDTH, requires_grad=True)
    with torch.no_grad():
        forward = counted(layer, x)
    too_much = 0
    if kind is Hydra:  # its depthwise convolution is torch's, whose backward torch counts as if it were a full one
        inside = torch.randn(BATCH, layer.conv1d.in_channels, 50, requires_grad=True)
        too_much = counted(lambda: layer.conv1d(inside).sum().backward()) - 3 * counted(layer.conv1d, inside)
    assert counted(lambda: layer(x).sum().backward()) == 3 * forward + too_much > 0


def test_directions_add_up():
    """Beside the projections that they share, each of v2's and v3's directions costs what Mamba's costs."""
    x = torch.randn(BATCH, 50, WIDTH)
    found = {name: counted(LAYERS[name][0](WIDTH, **LAYERS[name][1]), x) for name in list(LAYERS)[:4]}
    shared = 2 * BATCH * 50 * 6 * WIDTH**2  # in_proj makes 4 WIDTH columns, out_proj reads 2 WIDTH
    direction = found["Mamba"] - shared
    scan = 9 * BATCH * 50 * 2 * WIDTH * 16
    assert found["v1"] == shared + direction + scan
    assert found["both directions"] == shared + 2 * direction
    # the third direction has an output projection of its own
    assert found["three directions"] == shared + 3 * direction + 2 * BATCH * 50 * 2 * WIDTH**2


@pytest.mark.parametrize("layer", ["Mamba", "Mamba2"])
def test_one_operator_counts_what_single_ones_do(layer):
    """A hook on a submodule makes a block call its submodules and single operators."""
    kind, options = LAYERS[layer]
    layer = kind(WIDTH, **options)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    at_once = counted(layer, x)
    (layer.norm if kind is Mamba2 else layer.out_proj).register_forward_hook(lambda *_: None)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert torch.ops.mamba_ssm.causal_conv1d in counter.flop_counts["Global"]
    assert counter.get_total_flops() == at_once


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_a_language_model(layer):
    """Products of weights dominate a model: 2 FLOPs a parameter and token, and what layers add."""
    sizes = {"Mamba1": {}, "Mamba2": {"headdim": 32}, "Mamba3": {"headdim": 32, "d_state": 32}}[layer]
    config = MambaConfig(d_model=128, n_layer=2, vocab_size=512, ssm_cfg={"layer": layer, **sizes})
    model = MambaLMHeadModel(config)
    found = counted(model, torch.zeros(1, 64, dtype=torch.long))
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert 2 * 64 * weights < found < 2 * 2 * 64 * weights
