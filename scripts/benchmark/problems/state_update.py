"""selective_state_update, the decode step of a state."""

from functools import partial

import references
import torch

from problems.common import dtype_of, input_sets, normals


def inputs(case, device, seed=0):
    """Keyword arguments of selective_state_update but for dt_softplus."""
    normal, dtype = normals(device, seed), dtype_of(case)
    state_dtype = getattr(torch, case.state_dtype)
    if not case.heads:
        channels = (case.batch, case.dim)
        return {
            "state": normal(*channels, case.dstate, dtype=state_dtype),
            "x": normal(*channels, dtype=dtype),
            "dt": normal(*channels, dtype=dtype, scale=0.5),
            "A": -torch.arange(1.0, case.dstate + 1, device=device).repeat(case.dim, 1),
            "B": normal(case.batch, case.dstate, dtype=dtype),
            "C": normal(case.batch, case.dstate, dtype=dtype),
            "D": normal(case.dim),
            "z": normal(*channels, dtype=dtype),
            "dt_bias": normal(case.dim, scale=0.5) - 4.0,
        }
    per_channel = (case.heads, case.dim)
    channels = (case.batch, *per_channel)
    A = -torch.linspace(1, 16, case.heads, device=device)
    return {
        "state": normal(*channels, case.dstate, dtype=state_dtype),
        "x": normal(*channels, dtype=dtype),
        "dt": normal(case.batch, case.heads, dtype=dtype, scale=0.5)[..., None].expand(channels),
        "A": A[:, None, None].expand(*per_channel, case.dstate),
        "B": normal(case.batch, 1, case.dstate, dtype=dtype),
        "C": normal(case.batch, 1, case.dstate, dtype=dtype),
        "D": normal(case.heads)[:, None].expand(per_channel),
        "z": None,  # Mamba-2's norm takes the gate
        "dt_bias": (normal(case.heads, scale=0.5) - 4.0)[:, None].expand(per_channel),
    }


def prepare(case, device, side):
    function = side.function("mamba_ssm.ops.triton.selective_state_update:selective_state_update")
    function = partial(function, dt_softplus=True)
    make = partial(inputs, case, device)
    tensors = make()
    wide = {name: tensor if tensor is None else tensor.double() for name, tensor in tensors.items()}
    expected, state = references.state_update(**wide)
    side.check("out", function(**tensors), expected, tensors["x"].dtype)
    side.check("state", tensors["state"], state, tensors["state"].dtype)
    return {"step": [partial(function, **tensors) for tensors in input_sets(make, device)]}
