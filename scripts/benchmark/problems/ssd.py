"""mamba_chunk_scan_combined."""

from functools import partial

import references
import torch

from problems.common import check_with_gradients, differentiable_calls, dtype_of, input_sets, normals

WITH_BATCH = ("x", "dt", "B", "C")
CHUNK = 256


def inputs(case, device, seed=0):
    """Tensors of mamba_chunk_scan_combined by name, as a trained layer would see them."""
    normal, dtype = normals(device, seed), dtype_of(case)
    steps = (case.batch, case.seqlen)
    return {
        "x": normal(*steps, case.heads, case.headdim, dtype=dtype),
        "dt": normal(*steps, case.heads, dtype=dtype, scale=0.5),
        "A": -torch.linspace(1, 16, case.heads, device=device),
        "B": normal(*steps, 1, case.dstate, dtype=dtype),
        "C": normal(*steps, 1, case.dstate, dtype=dtype),
        "D": normal(case.heads),
        "dt_bias": normal(case.heads, scale=0.5) - 4.0,
    }


def validate(side, function, case, tensors):
    # Tensor cores take decayed products rounded to the dtype: its limit holds for the float32 sums too.
    check_with_gradients(side, function, references.ssd, tensors, WITH_BATCH, 1, dtype=dtype_of(case))


def prepare(case, device, side):
    function = side.function("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined")
    function = partial(function, chunk_size=CHUNK, dt_softplus=True)
    sets = input_sets(partial(inputs, case, device), device)
    validate(side, function, case, sets[0])
    return differentiable_calls(function, sets, case.passes)
