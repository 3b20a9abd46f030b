"""Rows of mamba3_forward and mamba3_step that other GPUs or calls run: each takes a call with those before it off."""

import os

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id
from _helpers.mamba3_cases import STATES, Mamba3Case

from mamba_ssm.ops.mamba3_scan import States, mamba3_scan, mamba3_scan_ref, mamba3_step
from mamba_ssm.utils import kernels

# As in test_mamba3_scan.py.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SISO = Mamba3Case(1, 70, 2, 40, dstate=64, nangles=16, states=True)
MIMO = Mamba3Case(1, 20, 2, 24, rank=4, dstate=128, nangles=32, states=True)
ROWS = {
    "siso_states64": SISO,
    "siso_states128": SISO,
    "mimo4_states128": MIMO,
    "states64": SISO,
    "states128": MIMO,
    "states256": SISO,
    "float32_states128": MIMO,
    "float32_states256": SISO,
}


def compute_capability():
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability()[0]
    return int(os.environ.get("MAMBA_EMULATOR_CAPABILITY", "9"))


def without_those_before(op, row, dtype):
    """A context in which `row` is the first of its table; skips the test where there is no such kernel."""
    rows = [kernel for kernel in kernels.kernels() if kernel.op == op]
    names = [kernel.name for kernel in rows]
    if row not in names or dtype_id(dtype) not in rows[names.index(row)].dtypes:
        pytest.skip("no such kernel")
    if rows[names.index(row)].architecture == 90 and compute_capability() != 9:
        pytest.skip("the kernel is for Hopper")
    before = rows[: names.index(row)]
    return kernels.without(*(kernel.id for kernel in before if dtype_id(dtype) in kernel.dtypes))


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_row_of_the_scan(row, dtype, cuda_kernels):
    case = ROWS[row]
    tensors = case.inputs(dtype, cuda_kernels)
    with torch.no_grad():
        with without_those_before("mamba3_forward", row, dtype), kernels.launched() as found:
            results = case.run(mamba3_scan)(**tensors)
        ran = {one.kernel.name for one in found if one.kernel.op == "mamba3_forward"}
        assert ran == {row}
        plain = case.run(mamba3_scan_ref, chunked=True)(**tensors)
        wide = {name: _wide(value) for name, value in tensors.items()}
        truth = case.run(mamba3_scan_ref, chunked=True)(**wide)
    results, plain, truth = (
        dict(zip(("out", "ssm", "k", "v"), (values[0], *values[2:]), strict=True)) for values in (results, plain, truth)
    )
    assert_close_to_truth(results, plain, truth, TOLERANCE[dtype])


def _wide(value):
    return value.double() if value is not None and value.is_floating_point() else value


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("row", "rank"),
    [
        ("rank1", 0),
        ("rank4_tensor_cores", 4),
        ("rank4", 4),
        ("rank1_any_dtypes", 0),
        ("vectors", 4),
        ("float32_vectors", 0),
        ("any", 4),
    ],
)
def test_a_row_of_the_step(row, rank, dtype, cuda_kernels):
    """dtype: of the state. All else is as the cache is allocated."""
    case = Mamba3Case(2, 1, 3, 24, rank=rank, dstate=64, nangles=16, states=True)
    inputs = torch.bfloat16 if dtype == torch.float32 else dtype
    tensors = case.inputs(inputs, cuda_kernels)
    for name in ("ADT", "DT", "Trap"):
        tensors[name] = tensors[name].to(inputs)
    wide = {name: _wide(value) for name, value in tensors.items()}
    truth, *finals = case.run(mamba3_scan_ref)(**wide)
    states = States(
        tensors["angle_state"],
        tensors["ssm_state"].to(dtype),
        tensors["k_state"].to(inputs),
        tensors["v_state"].to(inputs),
    )
    given = {name: value for name, value in tensors.items() if name not in STATES and value is not None}
    in_time = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z")
    one = {name: value[:, 0] if name in in_time else value for name, value in given.items()}
    with without_those_before("mamba3_step", row, dtype), kernels.launched() as found:
        out = mamba3_step(states, **one, pairwise=rank == 0)
    assert {one.kernel.name for one in found if one.kernel.op == "mamba3_step"} == {row}
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 6e-2}[inputs]
    for value, expected in ((out, truth[:, 0]), *zip(states[1:], finals[1:], strict=True)):
        limit = tolerance * max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=limit)
