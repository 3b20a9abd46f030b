"""mamba_inner_fn(reverse=True) and mamba_inner_fn_no_out_proj: of flipped tensors, flipped back."""

import functools

import pytest
import torch
from _helpers.cases import assert_close_to_truth, outputs_and_gradients
from _helpers.mamba_inner_inputs import inputs

from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, mamba_inner_fn_no_out_proj, mamba_inner_ref

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def by_flipping(**arguments):
    of_steps = ("xz", *(name for name in ("B", "C") if arguments[name] is not None and arguments[name].dim() == 3))
    flipped = {name: arguments[name].flip(2) for name in of_steps}
    return mamba_inner_ref(**{**arguments, **flipped}).flip(1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [{}, {"B": "given", "C": "constant"}, {"rms": True, "seqlen": 1}], ids=str)
def test_values_and_gradients(options, dtype, device):
    tensors = inputs(dtype, device, **options)
    found = outputs_and_gradients(functools.partial(mamba_inner_fn, reverse=True), tensors)
    plain = outputs_and_gradients(functools.partial(mamba_inner_ref, reverse=True), tensors)
    truth = outputs_and_gradients(by_flipping, tensors, torch.float64)
    assert_close_to_truth(found, plain, truth, TOLERANCE[dtype])


def test_without_output_projection(device):
    tensors = inputs(torch.float32, device)
    expected = mamba_inner_fn(**tensors, reverse=True)
    of_scan = {name: value for name, value in tensors.items() if "out_proj" not in name and "rms" not in name}
    y = mamba_inner_fn_no_out_proj(**of_scan, reverse=True).transpose(1, 2)
    projected = torch.nn.functional.linear(y, tensors["out_proj_weight"], tensors["out_proj_bias"])
    torch.testing.assert_close(projected, expected, rtol=1e-4, atol=1e-5)
