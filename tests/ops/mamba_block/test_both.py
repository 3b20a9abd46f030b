"""The inside of a block that runs in both directions, one node, against the sum of two references."""

import pytest
import torch
from _helpers.cases import assert_close_to_truth, outputs_and_gradients
from _helpers.mamba_inner_inputs import inputs

from mamba_ssm.ops.mamba_block import Direction, mamba_inner_both
from mamba_ssm.ops.mamba_block.reference import mamba_inner_ref

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
OWN = "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "A", "D", "delta_bias"
SHARED = "xz", "out_proj_weight", "out_proj_bias"

# On CUDA these take the scan's kernels for few and many states, states in slices, rows of whole vectors and others,
# tiles that are not full, one pipelined block a multiprocessor, and segments of the length.
SIZES = [
    {"seqlen": 1},
    {"seqlen": 71},
    {"seqlen": 136},
    {"seqlen": 128, "dstate": 16, "dim": 20},
    {"seqlen": 131, "dstate": 16, "batch": 1},
    {"seqlen": 67, "dstate": 33},
    {"seqlen": 72, "dstate": 70, "dim": 9},
    {"seqlen": 1100, "dstate": 16, "batch": 1, "dim": 12},
    {"seqlen": 1104, "dstate": 12, "batch": 1, "dim": 9},
    {"seqlen": 520, "dstate": 3, "batch": 1, "bias": False},
]


def both(function, tensors):
    forwards = Direction(*(tensors[name] for name in OWN))
    backwards = Direction(*(tensors[name + "_b"] for name in OWN))
    return function(*(tensors[name] for name in SHARED), forwards, backwards)


def one_after_the_other(xz, out_proj_weight, out_proj_bias, forwards, backwards):
    y, y_b = (
        mamba_inner_ref(xz, *of[:4], out_proj_weight, None, of.A, None, None, of.D, of.delta_bias, reverse=reverse)
        for of, reverse in ((forwards, False), (backwards, True))
    )
    return y + y_b if out_proj_bias is None else y + y_b + out_proj_bias


def check(sizes, dtype, device):
    tensors, others = inputs(dtype, device, **sizes), inputs(dtype, device, **sizes)
    tensors = {name: tensors[name] for name in (*SHARED, *OWN)} | {name + "_b": others[name] for name in OWN}
    found = outputs_and_gradients(lambda **tensors: both(mamba_inner_both, tensors), tensors)
    plain = outputs_and_gradients(lambda **tensors: both(one_after_the_other, tensors), tensors)
    truth = outputs_and_gradients(lambda **tensors: both(one_after_the_other, tensors), tensors, torch.float64)
    assert_close_to_truth(found, plain, truth, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(sizes, dtype, device):
    check(sizes, dtype, device)


@pytest.mark.gpu
def test_whole_tiles(cuda_kernels):
    """Enough blocks of whole tiles, for which the scan has kernels of its own: one adds to what the other writes."""
    check({"batch": 42, "dim": 256, "seqlen": 128, "dstate": 16}, torch.bfloat16, cuda_kernels)
