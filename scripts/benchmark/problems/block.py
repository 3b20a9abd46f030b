"""Whole Mamba and Mamba-2 layers, and what they keep and need for training."""

import copy
from functools import partial

import references
import torch

from problems.common import differentiable_calls, dtype_of, input_sets, normals
from problems.memory import memory_of_training

VALIDATED_STEPS = 256
PLACES = {"Mamba": "mamba_ssm.modules.mamba_simple:Mamba", "Mamba2": "mamba_ssm.modules.mamba2:Mamba2"}


def make_layer(case, device, module):
    torch.manual_seed(0)
    sizes = {"headdim": case.headdim, "d_state": case.d_state} if case.d_state else {}
    return module(case.d_model, **sizes, device=device, dtype=dtype_of(case))


def validate(side, layer, x):
    """The output's first steps at full size, and every gradient at a short length.

    bfloat16 projections and activations in between leave about 1 % of error.
    """
    short = x[-1:, :VALIDATED_STEPS].detach().requires_grad_()
    out = layer(short)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, [short, *layer.parameters()], dout)
    wide, wide_x = copy.deepcopy(layer).double(), short.detach().double().requires_grad_()
    expected = references.layer(wide, wide_x)
    exact = torch.autograd.grad(expected, [wide_x, *wide.parameters()], dout.double())
    with torch.no_grad():
        side.check_roughly("out", layer(x)[-1:, :VALIDATED_STEPS], expected)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    for name, gradient, reference in zip(names, found, exact, strict=True):
        side.check_roughly(f"d{name}", gradient, reference)


def prepare(case, device, side):
    layer = make_layer(case, device, side.function(PLACES[case.layer]))

    def make(seed):
        return {"x": normals(device, seed)(case.batch, case.seqlen, case.d_model, dtype=dtype_of(case))}

    sets, parameters = input_sets(make, device), list(layer.parameters())
    validate(side, layer, sets[0]["x"])
    calls = differentiable_calls(lambda x: layer(x), sets, case.passes, parameters)
    x = sets[0]["x"].detach().requires_grad_()
    dout = torch.randn_like(x)

    def gradients(out):
        return torch.autograd.grad(out, [x, *parameters], dout)

    return calls | {"memory": partial(memory_of_training, partial(layer, x), gradients)}
