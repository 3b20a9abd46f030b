"""Derivatives at the bends of the plain torch functions, where torch's own clamp differs between versions.

The tests of ops/ssd and ops/mamba3_block compare the kernels with them.
"""

import pytest
import torch

from mamba_ssm.modules.mamba3 import heavy_tail_activation
from mamba_ssm.ops.triton.ssd_combined import ssd_chunk_scan_combined_ref

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def values_and_slopes(function, values, dtype):
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    y = function(x)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == slopes.dtype == dtype
    return y.detach().double(), slopes.double()


@every_dtype
def test_heavy_tail(dtype):
    y, slopes = values_and_slopes(heavy_tail_activation, [-float("inf"), -1.0, -0.0, 0.0, 1.0, float("inf")], dtype)
    assert y.tolist() == [0.0, 0.5, 1.0, 1.0, 2.0, float("inf")]
    assert slopes.tolist() == [0.0, 0.25, 1.0, 1.0, 1.0, 1.0]
    y, slopes = values_and_slopes(heavy_tail_activation, [float("nan")], dtype)
    assert y.isnan().all() and slopes.isnan().all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_heavy_tail_under_torch_compile(backend, request):
    if backend == "inductor":
        request.getfixturevalue("needs_inductor")
    compiled = torch.compile(heavy_tail_activation, fullgraph=True, backend=backend)
    y, slopes = values_and_slopes(compiled, [-1.0, 0.0, 1.0], torch.float32)
    assert y.tolist() == [0.5, 1.0, 2.0] and slopes.tolist() == [0.25, 1.0, 1.0]


@every_dtype
def test_step_sizes_at_their_limits(dtype):
    """The derivative is 1 at a limit, as in the kernels, and 0 beyond."""
    sizes = [0.25, 0.5, 1.0, 2.0, 4.0]

    def out(dt):
        """The sum over the heads of dt B C x; nothing decays in one step."""
        x, A, matrix = (torch.ones(shape, dtype=dtype) for shape in ((1, 1, 5, 1), 5, (1, 1, 1, 1)))
        return ssd_chunk_scan_combined_ref(x, dt[None, None], A, matrix, matrix, 8, dt_limit=(0.5, 2.0))

    y, slopes = values_and_slopes(out, sizes, dtype)
    assert y.flatten().tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]
    assert slopes.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
