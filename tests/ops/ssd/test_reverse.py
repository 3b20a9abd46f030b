"""mamba_chunk_scan_combined(reverse=True): the scan of flipped tensors, flipped back."""

import functools

import pytest
import torch
from _helpers import by_turns
from _helpers.cases import SSD_CASES, SsdCase, assert_close_to_truth, outputs_and_gradients

from mamba_ssm.ops.ssd import mamba_chunk_scan_combined, ssd_chunk_scan_combined_ref

# As in test_ssd.py: what tensor cores take rounded, and the gradient before the gate.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
OF_STEPS = "x", "dt", "B", "C", "z", "seq_idx"

# CUDA splits these lengths into segments.
LONG_CASES = (
    SsdCase(1, 1025, 2, 64, dstate=128, initial_states=True),
    SsdCase(1, 1500, 2, 64, dstate=64, seq_idx=True, z=True, initial_states=True),
)


def by_flipping(**arguments):
    flipped = {
        name: value.flip(1) if name in OF_STEPS and value is not None else value for name, value in arguments.items()
    }
    out, states = ssd_chunk_scan_combined_ref(**flipped, return_final_states=True)
    return out.flip(1), states


def check(case, dtype, device):
    tensors = case.inputs(dtype, device)
    backwards = {"reverse": True, "return_final_states": True, **case.options()}
    found = outputs_and_gradients(functools.partial(mamba_chunk_scan_combined, **backwards), tensors)
    plain = outputs_and_gradients(functools.partial(ssd_chunk_scan_combined_ref, **backwards), tensors)
    truth = outputs_and_gradients(functools.partial(by_flipping, **case.options()), tensors, torch.float64)
    assert_close_to_truth(found, plain, truth, TOLERANCE[dtype])


@by_turns.parameters(SSD_CASES)
def test_values_and_gradients(case, dtype, device):
    check(case, dtype, device)


@by_turns.parameters(LONG_CASES, for_cuda=True)
def test_split_lengths(case, dtype, device):
    check(case, dtype, device)


def test_no_steps(device):
    tensors = SsdCase(2, 0, 2, 8, initial_states=True).inputs(torch.float32, device)
    out, states = mamba_chunk_scan_combined(**tensors, chunk_size=64, reverse=True, return_final_states=True)
    assert out.shape == (2, 0, 2, 8)
    assert torch.equal(states, tensors["initial_states"])


def test_a_nan_stays_in_its_sequence():
    case = SsdCase(1, 200, 2, 16, seq_idx=True)
    tensors = case.inputs(torch.float32, "cpu")
    tensors["seq_idx"] = torch.arange(200, dtype=torch.int32)[None] // 100
    tensors["x"][:, 150] = float("nan")
    out = mamba_chunk_scan_combined(**tensors, **case.options(), reverse=True)
    assert out[:, :100].isfinite().all() and out[:, 151:].isfinite().all() and out[:, 100:151].isnan().all()


def test_states_of_packed_sequences_are_refused():
    case = SsdCase(1, 20, 2, 16)
    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)
    call = functools.partial(
        mamba_chunk_scan_combined,
        **case.inputs(torch.float32, "cpu"),
        **case.options(),
        cu_seqlens=bounds,
        reverse=True,
    )
    assert call().shape == (1, 20, 2, 16)
    with pytest.raises(ValueError, match=r"return_varlen_states .* got reverse=True"):
        call(return_varlen_states=True)


def test_compiled_and_checked(device):
    case = SsdCase(2, 40, 2, 16, initial_states=True)
    tensors = case.inputs(torch.float32, device)
    for value in tensors.values():
        if value is not None:
            value.requires_grad_()
    arguments = *tensors.values(), False, 0.0, float("inf"), True, True
    torch.library.opcheck(torch.ops.mamba_ssm.ssd.default, arguments)
