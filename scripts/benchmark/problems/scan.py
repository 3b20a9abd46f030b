"""selective_scan_fn."""

from functools import partial

import references
import torch

from problems.common import differentiable_calls, dtype_of, input_sets, leaves_of, normals

OF_DTYPE = ("u", "delta", "B", "C", "z")  # the others are float32


def inputs(case, device, seed=0):
    """Keyword arguments of selective_scan_fn but for delta_softplus, as a trained layer would see them."""
    normal, dtype = normals(device, seed), dtype_of(case)
    groups = (case.groups,) if case.groups > 1 else ()
    wide, narrow = (case.batch, case.dim, case.seqlen), (case.batch, *groups, case.dstate, case.seqlen)
    gate = {"z": normal(*wide, dtype=dtype)} if case.gated else {}
    return {
        "u": normal(*wide, dtype=dtype),
        "delta": normal(*wide, dtype=dtype, scale=0.5),
        "A": -torch.arange(1.0, case.dstate + 1, device=device).repeat(case.dim, 1),
        "B": normal(*narrow, dtype=dtype),
        "C": normal(*narrow, dtype=dtype),
        "D": normal(case.dim),
        **gate,
        "delta_bias": normal(case.dim, scale=0.5) - 4.0,
    }


def validate(side, function, case, tensors):
    """out and every gradient of the call that is timed; only the last batch entry's output counts."""
    leaves = leaves_of(tensors)
    out = function(**leaves)
    dout = torch.zeros_like(out)
    dout[-1].normal_()
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))
    expected = references.scan_and_gradients(tensors, dout, -1, 1 << 27 if out.is_cuda else 1 << 22)
    side.check("out", out[-1], expected["out"], out.dtype)
    for name, gradient in gradients.items():
        got = gradient[-1] if name in OF_DTYPE else gradient
        # Sums of products of rounded inputs: exact inputs, so float32 accuracy, but for the ones stored in their dtype.
        side.check(f"d{name}", got, expected[name], got.dtype)


def prepare(case, device, side):
    function = side.function("mamba_ssm.ops.selective_scan_interface:selective_scan_fn")
    function = partial(function, delta_softplus=True)
    sets = input_sets(partial(inputs, case, device), device)
    validate(side, function, case, sets[0])
    return differentiable_calls(function, sets, case.passes)
