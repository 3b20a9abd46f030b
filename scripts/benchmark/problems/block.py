"""Whole layers, and what they keep and need for training."""

import copy
from functools import partial

import references
import torch
from layer_kinds import Bidirectional

from problems.common import differentiable_calls, dtype_of, input_sets, normals
from problems.memory import memory_of_training

VALIDATED_STEPS = 256
# layer: (where its class is, its options)
LAYERS = {
    "Mamba": ("mamba_ssm.modules.mamba_simple:Mamba", {}),
    "Mamba v2": ("mamba_ssm.modules.mamba_simple:Mamba", {"bimamba_type": "v2"}),
    "Mamba2": ("mamba_ssm.modules.mamba2:Mamba2", {}),
    "BiMamba2": ("mamba_ssm.modules.bimamba2:BiMamba2", {}),
    "Hydra": ("mamba_ssm.modules.hydra:Hydra", {}),
    "Mamba3": ("mamba_ssm.modules.mamba3:Mamba3", {}),
    # upstream's advice for its chunks, 64 / rank; ours has its own
    "Mamba3 MIMO": ("mamba_ssm.modules.mamba3:Mamba3", {"is_mimo": True, "mimo_rank": 4, "chunk_size": 16}),
}


def make_layer(case, device, module):
    torch.manual_seed(0)
    options = LAYERS[case.layer][1] | ({"headdim": case.headdim, "d_state": case.d_state} if case.d_state else {})
    return module(case.d_model, **options, device=device, dtype=dtype_of(case))


def validate(side, layer, x, causal=True):
    """The output at full size, and every gradient at a short length.

    Of the output the first steps, for a layer where they do not depend on what follows; else the last row.
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
        if causal:
            side.check_roughly("out", layer(x)[-1:, :VALIDATED_STEPS], expected)
        else:
            side.check_roughly("out", layer(x)[-1:], references.layer(wide, x[-1:].double()))
    names = ["x", *(name for name, _ in layer.named_parameters())]
    for name, gradient, reference in zip(names, found, exact, strict=True):
        side.check_roughly(f"d{name}", gradient, reference)


def prepare(case, device, side):
    layer = make_layer(case, device, side.function(LAYERS[case.layer][0]))

    def make(seed):
        return {"x": normals(device, seed)(case.batch, case.seqlen, case.d_model, dtype=dtype_of(case))}

    sets, parameters = input_sets(make, device), list(layer.parameters())
    validate(side, layer, sets[0]["x"], causal=not isinstance(case, Bidirectional))
    calls = differentiable_calls(lambda x: layer(x), sets, case.passes, parameters)
    x = sets[0]["x"].detach().requires_grad_()
    dout = torch.randn_like(x)

    def gradients(out):
        return torch.autograd.grad(out, [x, *parameters], dout)

    return calls | {"memory": partial(memory_of_training, partial(layer, x), gradients)}
