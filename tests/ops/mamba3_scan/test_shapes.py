"""mamba3_scan forward where its CUDA kernels part ways: sizes of layouts, ranks in passes, rows apart, segments."""

import pytest
import torch
from _helpers.cases import assert_close_to_truth, case_id, dtype_id
from _helpers.mamba3_cases import Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan, mamba3_scan_ref

# As in test_mamba3_scan.py.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CASES = (
    Mamba3Case(1, 130, 2, 64, dstate=128, nangles=32),
    Mamba3Case(1, 70, 2, 64, dstate=128, nangles=64, rank=4, norm=True),  # all of N turned
    Mamba3Case(1, 90, 2, 8, dstate=98, nangles=20, rank=2, states=True),  # halves that are no words
    Mamba3Case(1, 100, 1, 100, dstate=200, nangles=50, states=True, norm=True),  # a norm over two tiles
    Mamba3Case(1, 40, 1, 130, dstate=256, nangles=128, rank=2, norm=True, states=True),
    Mamba3Case(1, 3, 1, 20, dstate=256, nangles=64, rank=40, states=True),  # ranks in three passes
    Mamba3Case(1, 5, 1, 70, dstate=30, nangles=15, rank=33, states=True, reduced=False),
    Mamba3Case(1, 6, 1, 70, dstate=129, nangles=63, rank=17, states=True),
    Mamba3Case(1, 1200, 1, 8, states=True, seq_idx=True),  # segments
    Mamba3Case(1, 1200, 1, 8, dstate=100, nangles=20, states=True),
    # What Hopper's warpgroups take: every number of ranks, tails of rows, columns and chunks, packed sequences.
    Mamba3Case(1, 200, 2, 64, dstate=128, nangles=64, groups=2, states=True, norm=True),
    Mamba3Case(1, 100, 2, 136, dstate=66, nangles=24, angles_of_heads=True, states=True),
    Mamba3Case(1, 150, 4, 64, dstate=32, nangles=8, cu_seqlens=(0, 64, 64, 65, 67, 150), norm=True, states=True),
    Mamba3Case(1, 70, 2, 64, dstate=128, nangles=64, rank=1, norm=True),
    Mamba3Case(1, 67, 2, 64, dstate=128, nangles=32, rank=2, norm=True, Z=False),
    Mamba3Case(1, 37, 2, 48, dstate=96, nangles=24, rank=3, norm=True, states=True),
    Mamba3Case(1, 37, 2, 136, dstate=64, nangles=24, rank=5, reduced=False, states=True),
    Mamba3Case(1, 37, 2, 64, dstate=128, nangles=32, rank=8, states=True),
    Mamba3Case(1, 21, 2, 64, dstate=128, nangles=32, rank=16, states=True),
    Mamba3Case(1, 600, 1, 8, rank=4, states=True),  # segments
    # Four ranks of 128 states have a kernel of their own: tails of steps and columns, groups, packed sequences.
    Mamba3Case(2, 67, 2, 64, dstate=128, nangles=32, rank=4, states=True),
    Mamba3Case(1, 45, 4, 136, dstate=128, nangles=20, rank=4, groups=2, D=False, states=True),
    Mamba3Case(1, 150, 2, 40, dstate=128, nangles=32, rank=4, cu_seqlens=(0, 16, 16, 17, 150), states=True),
    Mamba3Case(1, 600, 1, 64, dstate=128, nangles=32, rank=4, angles_of_heads=True, states=True),
)


def check_values(case, tensors, dtype):
    wide = {
        name: tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    with torch.no_grad():
        found = case.run(mamba3_scan)(**tensors)
        again = case.run(mamba3_scan)(**tensors)
        plain = case.run(mamba3_scan_ref, chunked=True)(**tensors)
        truth = case.run(mamba3_scan_ref, chunked=True)(**wide)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))
    found, plain, truth = (
        {"out": out, "cos": angle.cos(), "sin": angle.sin(), "ssm": ssm, "k": k, "v": v}
        for out, angle, ssm, k, v in (found, plain, truth)
    )
    assert_close_to_truth(found, plain, truth, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_values(case, dtype, device):
    check_values(case, case.inputs(dtype, device), dtype)


@pytest.mark.parametrize(("before", "pitch"), [(8, 136), (4, 132), (1, 129)])
@pytest.mark.parametrize(("rank", "nangles"), [(0, 32), (0, 64), (4, 32)])
def test_rows_between_other_values(rank, nangles, before, pitch, device):
    """Rows at multiples of 16, 8 and 2 bytes, which are copied differently or have different kernels on Hopper."""
    case = Mamba3Case(2, 70, 2, 64, dstate=128, nangles=nangles, rank=rank, groups=2, states=True)
    tensors = case.inputs(torch.bfloat16, device)
    for name in ("Q", "K"):
        wide = torch.full((*tensors[name].shape[:-1], pitch), torch.nan, dtype=torch.bfloat16, device=device)
        wide[..., before : before + 128] = tensors[name]
        tensors[name] = wide[..., before : before + 128]
    check_values(case, tensors, torch.bfloat16)
