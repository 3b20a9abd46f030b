"""mamba_chunk_scan_combined: values and gradients against the float64 reference, memory layouts, and options."""

import pytest
import torch
from cases import DTYPES, SSD_CASES, assert_close_to_truth, case_id, dtype_id, outputs_and_gradients

from mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan_combined,
    ssd_chunk_scan_combined_ref,
)

# What one result may be off, relative to its largest value, beside twice plain torch's error.
# float32: sums in another order. 16 bits: with z, backward rounds the gradient before the gate to the dtype; on the GPU
# tensor cores also take states and decayed products rounded to the dtype (half an ulp: 2^-11 and 2^-8).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def scan(function, case):
    def run(**tensors):
        return function(**tensors, **case.options(), return_final_states=True)

    return run


def check(case, dtype, device, tensors=None):
    tensors = tensors or case.inputs(dtype, device)
    found = outputs_and_gradients(scan(mamba_chunk_scan_combined, case), tensors)
    plain = outputs_and_gradients(scan(ssd_chunk_scan_combined_ref, case), tensors)
    truth = outputs_and_gradients(scan(ssd_chunk_scan_combined_ref, case), tensors, torch.float64)
    assert found["out0"].dtype == dtype
    assert found["out1"].dtype == torch.float32
    assert_close_to_truth(found, plain, truth, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", SSD_CASES, ids=case_id)
def test_values_and_gradients(case, dtype, device):
    check(case, dtype, device)
