"""cross_selective_scan, or the same by one selective scan over four copies of the images, as VMamba's code has it."""

from functools import partial

import references
import torch

from problems.common import check_with_gradients, differentiable_calls, dtype_of, input_sets, normals


def inputs(case, device, seed=0):
    """Arguments of cross_selective_scan, as a trained layer would see them."""
    normal, dtype = normals(device, seed), dtype_of(case)
    rows = case.rank + 2 * case.dstate
    return {
        "x": normal(case.batch, case.dim, case.height, case.width, dtype=dtype),
        "x_proj_weight": normal(4, rows, case.dim, dtype=dtype, scale=case.dim**-0.5),
        "dt_proj_weight": normal(4, case.dim, case.rank, dtype=dtype, scale=0.5 * case.rank**-0.5),
        "A": -torch.arange(1.0, case.dstate + 1, device=device).repeat(4, case.dim, 1),
        "D": normal(4, case.dim),
        "dt_bias": normal(4, case.dim, scale=0.5) - 4.0,
    }


def _by_copies(scan, x, x_proj_weight, dt_proj_weight, A, D, dt_bias):
    rank, dstate = dt_proj_weight.shape[2], A.shape[2]
    orders = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], dim=1)
    lines = torch.cat([orders, orders.flip(-1)], dim=1)  # (batch, 4, D, L)
    dt, B, C = torch.einsum("bkdl,kcd->bkcl", lines, x_proj_weight).split([rank, dstate, dstate], dim=2)
    dt = torch.einsum("bkrl,kdr->bkdl", dt, dt_proj_weight).flatten(1, 2)
    u, A, D, dt_bias = lines.flatten(1, 2), A.flatten(0, 1), D.flatten(), dt_bias.flatten()
    B, C = B.contiguous(), C.contiguous()
    y = scan(u, dt, A, B, C, D, delta_bias=dt_bias, delta_softplus=True).view_as(lines)
    both = y[:, :2] + y[:, 2:].flip(-1)
    return both[:, 0].view_as(x) + both[:, 1].unflatten(-1, (x.shape[3], x.shape[2])).transpose(2, 3)


def prepare(case, device, side):
    if case.copies:
        function = partial(_by_copies, side.function("mamba_ssm.ops.selective_scan_interface:selective_scan_fn"))
    else:
        function = side.function("mamba_ssm.ops.cross_selective_scan:cross_selective_scan")
    sets = input_sets(partial(inputs, case, device), device)
    # the projections give dt, B and C in the images' dtype
    check_with_gradients(side, function, references.cross_scan, sets[0], ("x",), 1, roughly=case.dtype != "float32")
    return differentiable_calls(function, sets, case.passes)
