"""Cases that run on CUDA in all dtypes and on the CPU in one, by turns: a CPU kernel is one template for all dtypes."""

import pytest

from _helpers.cases import DTYPES, case_id, dtype_id


def parameters(cases, dtypes=DTYPES, for_cuda=False):
    """Parametrizes a test's case, dtype and device: on CUDA each case in all dtypes, on the CPU in one, by turns.

    for_cuda: of cases whose shapes are those of CUDA's kernels, every third runs on the CPU: the reference takes long.
    """
    names = ("case", "dtype", "device")
    chosen = cases[::3] if for_cuda else cases
    on_cpu = [(case, dtypes[turn % len(dtypes)], "cpu") for turn, case in enumerate(chosen)]
    on_cuda = [(case, dtype, "cuda") for case in cases for dtype in dtypes]
    params = [
        pytest.param(
            case,
            dtype,
            device,
            id=f"{device}-{case_id(case)}-{dtype_id(dtype)}",
            marks=pytest.mark.gpu if device == "cuda" else (),
        )
        for case, dtype, device in on_cpu + on_cuda
    ]
    return pytest.mark.parametrize(names, params, indirect=["device"])
