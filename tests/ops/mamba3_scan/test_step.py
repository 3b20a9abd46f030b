"""mamba3_step: steps in place are the scan, in every dtype of the states; what is written, and what is refused."""

import os

import pytest
import torch
from _helpers.cases import case_id
from _helpers.mamba3_cases import STATES, Mamba3Case

from mamba_ssm.ops.mamba3_scan import States, mamba3_scan_ref, mamba3_step

IN_TIME = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z")
CASES = (
    Mamba3Case(3, 9, 4, 8, groups=2, states=True),
    Mamba3Case(2, 9, 6, 48, dstate=96, groups=3, nangles=24, norm=True, states=True),
    Mamba3Case(2, 9, 2, 5, dstate=37, nangles=18, rank=4, norm=True, angles_of_heads=True, states=True),
    Mamba3Case(1, 9, 2, 7, dstate=9, nangles=0, rank=3, reduced=False, Z=False, D=False, states=True),
)


def steps(case, tensors, states, **options):
    """Outputs of a step after the other, (B, L, ...)."""
    given = {name: value for name, value in tensors.items() if name not in STATES and value is not None}
    outs = []
    for t in range(case.seqlen):
        one = {name: value[:, t] if name in IN_TIME else value for name, value in given.items()}
        outs.append(mamba3_step(states, **one, pairwise=case.rank == 0, **options))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_steps_are_the_scan(case, dtype, device):
    tensors = case.inputs(torch.float32, device)
    truth, *finals = case.run(mamba3_scan_ref)(**tensors)
    states = States(*(tensors[name].to(dtype if name != "angle_state" else torch.float32) for name in STATES))
    out = steps(case, tensors, states)
    # what is rounded to the states' dtype at each of nine steps
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for found, expected in ((out, truth), *zip(states[1:], finals[1:], strict=True)):
        limit = tolerance * max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=limit)
    torch.testing.assert_close(torch.cos(states.angle), torch.cos(finals[0]), rtol=0, atol=1e-5)


def test_ten_thousand_steps(device):
    """The angle goes round many times and is kept in one float; its error must not grow in one direction."""
    case = Mamba3Case(1, 10_000 if device == "cpu" else 1000, 1, 2, dstate=4, nangles=2, states=True)
    tensors = case.inputs(torch.float32, device)
    tensors["Angles"] += torch.tensor([3.0, 100.0], device=device)
    wide = {name: _wide(value) for name, value in tensors.items()}
    truth, angle, *_ = case.run(mamba3_scan_ref, chunked=True)(**wide)
    states = States(*(tensors[name].clone() for name in STATES))
    out = steps(case, tensors, states)
    torch.testing.assert_close(out.double(), truth.double(), rtol=0, atol=1e-3 * truth.abs().max().item())
    for function in (torch.cos, torch.sin):
        torch.testing.assert_close(function(states.angle.double()), function(angle), rtol=0, atol=1e-4)


def _wide(value):
    return None if value is None else value.double()


def test_states_of_any_strides_are_written(device):
    case = CASES[0]
    tensors = case.inputs(torch.float32, device)
    dense = States(*(tensors[name].clone() for name in STATES))
    strided = States(*(tensors[name].transpose(0, -1).contiguous().transpose(0, -1) for name in STATES))
    assert torch.equal(steps(case, tensors, strided), steps(case, tensors, dense))
    for ours, theirs in zip(strided, dense, strict=True):
        assert torch.equal(ours, theirs)


def test_written_states_are_noticed(device):
    case = CASES[0]
    tensors = case.inputs(torch.float32, device)
    states = States(*(tensors[name].clone() for name in STATES))
    versions = [state._version for state in states]
    steps(case, tensors, states)
    assert all(state._version > version for state, version in zip(states, versions, strict=True))


def test_wrong_states(device):
    case = CASES[0]
    tensors = case.inputs(torch.float32, device)
    states = States(*(tensors[name] for name in STATES))
    with pytest.raises(TypeError, match="mamba3_scan: angle_state must be float32, got bfloat16"):
        steps(case, tensors, states._replace(angle=states.angle.bfloat16()))
    with pytest.raises(ValueError, match=r"mamba3_scan: ssm_state must have shape \(U, H, P, N\)"):
        steps(case, tensors, states._replace(ssm=states.ssm[:1]))
    if device == "cpu":
        with pytest.raises(ValueError, match="v_state is written in place, but its elements share memory"):
            steps(case, tensors, states._replace(v=states.v[:1].expand(3, 4, 8)))


@pytest.mark.gpu
def test_more_shared_memory_than_a_gpu_has_is_said(cuda_kernels):
    case = Mamba3Case(1, 1, 1, 256, dstate=256, nangles=8, rank=64, D=False, Z=False, states=True)
    tensors = case.inputs(torch.float32, cuda_kernels)
    states = States(*(tensors[name] for name in STATES))
    if os.environ.get("MAMBA_EMULATOR_SHARED") == "65536":
        said = r"mamba3_step: needs \d+ bytes of shared memory, of which this GPU lets a block have 65536: batch=1"
        with pytest.raises(NotImplementedError, match=said):
            steps(case, tensors, states)
    else:
        assert steps(case, tensors, states).isfinite().all()
