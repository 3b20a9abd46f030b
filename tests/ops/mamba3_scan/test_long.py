"""Mamba-3's scan over many steps, and over tensors beyond 2^31 elements."""

import math

import pytest
import torch
from _helpers.mamba3_cases import Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan


def test_the_angle_of_a_million_steps(device):
    """Turns are added up, and whole ones dropped: the angle does not lose what its size would cost."""
    case = Mamba3Case(1, 1_000_000, 1, 1, dstate=8, nangles=4, D=False, Z=False)
    tensors = case.inputs(torch.float32, device)
    tensors["Angles"] += torch.tensor([0.0, 3.0, 100.0, -100.0], device=device)
    out, angle, *_ = case.run(mamba3_scan)(**tensors)
    true = math.pi * (torch.tanh(tensors["Angles"].double()) * tensors["DT"].double()).sum(1)
    assert out.isfinite().all() and true.abs().max() > 100_000 * 2 * math.pi
    assert angle.min() >= 0 and angle.max() < 2 * math.pi + 1e-6
    for function in (torch.cos, torch.sin):  # 1e6 roundings of tanh and dt, 3e-8 each
        torch.testing.assert_close(function(angle.double().flatten()), function(true.flatten()), rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_more_than_two_billion_elements(cuda):
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    batch, seqlen, nheads, headdim, dstate = 2, 2**18 + 64, 65, 64, 16
    shape = batch, seqlen, nheads
    V = torch.randn(*shape, headdim, device=cuda, dtype=torch.bfloat16)
    assert V.numel() > 2**31
    K, Q = torch.randn(2, batch, seqlen, 1, 1, dstate, device=cuda, dtype=torch.bfloat16)
    DT = torch.full((1, 1, 1), 0.1, device=cuda).expand(shape)
    angles = torch.randn(batch, seqlen, 4, device=cuda, dtype=torch.bfloat16)
    bias = torch.ones(nheads, 1, dstate, device=cuda)
    out = mamba3_scan(Q, K, V, -DT, DT, DT, bias, bias, angles)
    for b, h in ((0, 0), (batch - 1, nheads - 1), (1, 30)):
        entry, head = slice(b, b + 1), slice(h, h + 1)
        step, row = DT[entry, :, head], bias[head]
        alone = mamba3_scan(Q[entry], K[entry], V[entry, :, head], -step, step, step, row, row, angles[entry])
        torch.testing.assert_close(out[b, :, :, h], alone[0, :, :, 0], rtol=2e-2, atol=2e-2 * alone.abs().max().item())
