"""Rows of mamba3_backward that other GPUs or calls run: each takes the calls of the rows before it, with these off."""

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, case_id, dtype_id, outputs_and_gradients
from _helpers.mamba3_cases import Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan, mamba3_scan_ref
from mamba_ssm.utils import kernels

# As in test_mamba3_scan.py.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CASES = (
    Mamba3Case(1, 70, 2, 40, dstate=128, nangles=32, states=True),
    Mamba3Case(1, 20, 2, 24, rank=4, dstate=128, nangles=32, states=True),
)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["states128", "states128_16_rows", "states256_32_rows", "states256"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_row_without_those_before_it(case, dtype, row, cuda_kernels):
    if (row == "states128_16_rows" and dtype != torch.float32) or (
        row == "states256_32_rows" and dtype == torch.float32
    ):
        pytest.skip("not a row of this dtype")
    rows = ("siso_warpgroups", "mimo4_warpgroups", "states128", "states128_16_rows", "states256_32_rows", "states256")
    off = [f"mamba3_backward/{name}" for name in rows[: rows.index(row)]]
    tensors = case.inputs(dtype, cuda_kernels)
    listed = {kernel.id for kernel in kernels.kernels()}
    with kernels.without(*(name for name in off if name in listed)), kernels.launched() as found:
        results = outputs_and_gradients(case.run(mamba3_scan), tensors)
    ran = {one.kernel.name for one in found if one.kernel.op == "mamba3_backward"}
    # On GPUs with less shared memory a call may run a row further down.
    assert ran == {row} or (row in ("states128", "states256_32_rows") and ran <= {"states128_16_rows", "states256"})
    plain = outputs_and_gradients(case.run(mamba3_scan_ref), tensors)
    truth = outputs_and_gradients(case.run(mamba3_scan_ref), tensors, torch.float64)
    assert_close_to_truth(results, plain, truth, TOLERANCE[dtype])
