"""Cases for CUDA's kernels: their shapes tell the CPU's kernels little, and the reference takes long."""

import pytest

from _helpers.cases import DTYPES, case_id, dtype_id


def parameters(cases, dtypes=DTYPES):
    """Parametrizes a test's case, dtype and device: on CUDA each case in all dtypes, on the CPU in one, by turns."""
    names = ("case", "dtype", "device")
    on_cpu = [(case, dtypes[turn % len(dtypes)], "cpu") for turn, case in enumerate(cases)]
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
