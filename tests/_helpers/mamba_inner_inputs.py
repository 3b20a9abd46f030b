"""Random arguments of mamba_inner_fn, for the tests of it and of the block around it."""

import torch

D_MODEL, DIM, DSTATE, RANK = 12, 24, 5, 3


def inputs(
    dtype,
    device,
    batch=2,
    seqlen=71,
    B="variable",
    C="variable",
    bias=True,
    proj_bias=False,
    rms=False,
    dim=DIM,
    dstate=DSTATE,
):
    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * torch.randn(*shape)).to(device, dtype)

    f32 = torch.float32
    rows = RANK + (B == "variable") * dstate + (C == "variable") * dstate
    given = {"constant": lambda: normal(dim, dstate, dtype=f32), "given": lambda: normal(batch, dstate, seqlen)}
    return {
        "xz": normal(batch, 2 * dim, seqlen),
        "conv1d_weight": normal(dim, 1, 4),
        "conv1d_bias": normal(dim) if bias else None,
        "x_proj_weight": normal(rows, dim, scale=dim**-0.5),
        "delta_proj_weight": normal(dim, RANK, scale=RANK**-0.5),
        "out_proj_weight": normal(D_MODEL, dim, scale=dim**-0.5),
        "out_proj_bias": normal(D_MODEL) if bias else None,
        "A": -0.5 - torch.rand(dim, dstate).to(device),
        "B": None if B == "variable" else given[B](),
        "C": None if C == "variable" else given[C](),
        "D": normal(dim, dtype=f32),
        "delta_bias": normal(dim, dtype=f32),
        "B_proj_bias": normal(dstate) if proj_bias else None,
        "C_proj_bias": normal(dstate) if proj_bias else None,
        "b_rms_weight": normal(dstate, dtype=f32) if rms else None,
        "c_rms_weight": normal(dstate, dtype=f32) if rms else None,
        "dt_rms_weight": normal(dim, dtype=f32) if rms else None,
    }
