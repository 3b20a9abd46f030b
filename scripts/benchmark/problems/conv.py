"""causal_conv1d_fn and causal_conv1d_update: the package causal_conv1d's, or the ones built into mamba_ssm."""

from functools import partial

import kinds
import references
import torch

from problems.common import check_with_gradients, differentiable_calls, dtype_of, input_sets, normals

WIDTH = 4
PLACES = "causal_conv1d", "mamba_ssm.ops.causal_conv1d"


def inputs(case, device, seed=0):
    normal, dtype = normals(device, seed), dtype_of(case)
    if isinstance(case, kinds.ConvUpdate):
        sizes = {"x": (case.batch, case.dim), "conv_state": (case.batch, case.dim, WIDTH)}
        tensors = {name: normal(*shape, dtype=dtype) for name, shape in sizes.items()}
    elif case.channel_last:
        tensors = {"x": normal(case.batch, case.seqlen, case.dim, dtype=dtype).transpose(1, 2)}
    else:
        tensors = {"x": normal(case.batch, case.dim, case.seqlen, dtype=dtype)}
    return tensors | {
        "weight": normal(case.dim, WIDTH, dtype=dtype, scale=0.5),
        "bias": normal(case.dim, dtype=dtype),
    }


def prepare(case, device, side):
    make = partial(inputs, case, device)
    if isinstance(case, kinds.ConvUpdate):
        function = partial(side.function(*(f"{place}:causal_conv1d_update" for place in PLACES)), activation="silu")
        _validate_update(side, function, make(0))
        return {"step": [partial(function, **tensors) for tensors in input_sets(make, device)]}
    function = partial(side.function(*(f"{place}:causal_conv1d_fn" for place in PLACES)), activation="silu")
    sets = input_sets(make, device)
    check_with_gradients(side, function, references.conv, sets[0], ("x",), 1)
    return differentiable_calls(function, sets, case.passes)


def _validate_update(side, function, tensors):
    names = ("x", "conv_state", "weight", "bias")
    expected, state = references.conv_update(*(tensors[name].double() for name in names))
    with torch.no_grad():
        side.check("out", function(**tensors), expected, tensors["x"].dtype)
    side.check("conv_state", tensors["conv_state"], state, tensors["x"].dtype)
