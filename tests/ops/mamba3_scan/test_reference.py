"""Mamba-3's two references in plain torch, which must agree: step by step, and chunk by chunk."""

import math

import pytest
import torch
from _helpers.cases import case_id, outputs_and_gradients
from _helpers.mamba3_cases import MAMBA3_CASES, STATES, Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan_ref

F64 = torch.float64


@pytest.mark.parametrize("case", MAMBA3_CASES, ids=case_id)
def test_steps_and_chunks_agree(case, device):
    tensors = case.inputs(torch.float32, device)
    expected = outputs_and_gradients(case.run(mamba3_scan_ref), tensors, F64)
    found = outputs_and_gradients(case.run(mamba3_scan_ref, chunked=True), tensors, F64)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == F64
        largest = value.abs().max().item() if value.numel() else 0.0
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12 * max(largest, 1.0), msg=name)


def test_a_sequence_in_pieces(device):
    case = Mamba3Case(2, 150, 4, 8, rank=2, norm=True)
    tensors = case.inputs(F64, device)
    expected = case.run(mamba3_scan_ref)(**tensors)
    parts, states = [], ()
    for begin, end in ((0, 1), (1, 1), (1, 70), (70, 150)):
        in_time = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z")
        piece = {name: value[:, begin:end] if name in in_time else value for name, value in tensors.items()}
        out, *states = case.run(mamba3_scan_ref, chunked=True)(**piece, **dict(zip(STATES, states, strict=False)))
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), expected[0], rtol=0, atol=1e-12)
    for state, other in zip(states, expected[1:], strict=True):
        torch.testing.assert_close(state, other, rtol=0, atol=1e-12)


def test_rank_1_is_siso_with_the_entries_of_q_and_k_in_another_order(device):
    tensors = Mamba3Case(2, 40, 4, 8, dstate=16, nangles=8).inputs(F64, device)
    expected = mamba3_scan_ref(**tensors)
    order = torch.arange(16, device=device).view(8, 2).t().flatten()  # neighbours as halves
    for name in ("Q", "K", "Q_bias", "K_bias"):
        tensors[name] = tensors[name][..., order]
    torch.testing.assert_close(mamba3_scan_ref(**tensors, pairwise=False), expected, rtol=0, atol=1e-12)


def test_two_steps_by_hand():
    """One head, one channel, one state, an angle of none: h_1 = gamma_1 k_1 x_1, and both weights of step 1 in h_2."""
    one = torch.ones(1, 2, 1, dtype=F64)
    lam = torch.tensor([0.25, 0.75], dtype=F64)
    tensors = {
        "Q": one.new_tensor([2.0, 3.0]).view(1, 2, 1, 1, 1),
        "K": one.new_tensor([5.0, 7.0]).view(1, 2, 1, 1, 1),
        "V": one.new_tensor([11.0, 13.0]).view(1, 2, 1, 1),
        "ADT": math.log(0.5) * one,
        "DT": one.new_tensor([1.0, 2.0]).view(1, 2, 1),
        "Trap": torch.log(lam / (1 - lam)).view(1, 2, 1),
        "Q_bias": one.new_zeros(1, 1, 1),
        "K_bias": one.new_zeros(1, 1, 1),
        "Angles": one.new_zeros(1, 2, 0),
    }
    first = 0.25 * 1 * 5 * 11
    second = 0.5 * (first + 0.25 * 2 * 5 * 11) + 0.75 * 2 * 7 * 13
    for chunked in (False, True):
        out = mamba3_scan_ref(**tensors, chunked=chunked)
        torch.testing.assert_close(out.flatten(), one.new_tensor([2 * first, 3 * second]))


@pytest.mark.parametrize("chunked", [False, True])
def test_the_angle_stays_exact(chunked, device):
    """What is kept is the angle, and not how often it went round. Near a turn's end it jumps: cos and sin do not."""
    case = Mamba3Case(1, 100_000 if chunked else 1000, 1, 1, dstate=4, nangles=2, D=False, Z=False)
    tensors = case.inputs(torch.float32, device)
    tensors["Angles"][..., 0] = 100.0
    angle = case.run(mamba3_scan_ref, chunked=chunked)(**tensors)[1].flatten().double()
    true = (math.pi * tensors["DT"].double() * torch.tanh(tensors["Angles"].double())).sum(1).flatten()
    assert angle.min() >= 0
    assert angle.max() < 2 * math.pi + 1e-6
    for function in (torch.cos, torch.sin):
        torch.testing.assert_close(function(angle), function(true), rtol=0, atol=1e-4)
