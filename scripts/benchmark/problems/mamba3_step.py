"""mamba3_step, a decoding step of Mamba-3's scan; upstream's needs another compiler package and is not measured."""

import math
from functools import partial

import references
import torch

from problems.common import input_sets, normals
from problems.mamba3_scan import inputs

PLACE = "mamba_ssm.ops.mamba3_scan:mamba3_step"
STATES = ("angle", "ssm", "k", "v")


def _tensors(case, device, seed=0):
    """The step's arguments, and the four states under their names."""
    normal, dtype = normals(device, 1000 + seed), getattr(torch, case.state_dtype)
    steps = (case.batch, case.heads)
    states = {
        "angle": math.pi * torch.sigmoid(normal(*steps, case.dstate // 4)),
        "ssm": normal(*steps, case.headdim, case.dstate, dtype=dtype),
        "k": normal(case.batch, 1, case.heads, case.dstate, dtype=dtype),
        "v": normal(*steps, case.headdim, dtype=dtype),
    }
    return inputs(case, device, seed) | states


def _call(function, states_class, **tensors):
    states = states_class(*(tensors.pop(name) for name in STATES))
    return function(states, **tensors).squeeze(1)  # the rank


def prepare(case, device, side):
    states_class = side.function("mamba_ssm.ops.mamba3_scan:States")
    function = partial(_call, side.function(PLACE), states_class)
    make = partial(_tensors, case, device)
    tensors = make()
    expected, states = references.mamba3_step(**{name: tensor.double() for name, tensor in tensors.items()})
    side.check("out", function(**tensors), expected, tensors["V"].dtype)
    for name, state in zip(STATES, states, strict=True):
        side.check(f"state {name}", tensors[name], state, tensors[name].dtype)
    return {"step": [partial(function, **tensors) for tensors in input_sets(make, device)]}
