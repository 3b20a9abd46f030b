"""The norms: RMSNorm fused with the residual's addition, as in a language model, and with a gate, as in Mamba-2."""

from functools import partial

import references

from problems.common import check_with_gradients, differentiable_calls, dtype_of, input_sets, normals

VALIDATED_ROWS = 512
EPS = 1e-5


def _add(function, x, residual, weight):
    return function(x, weight, None, residual=residual, eps=EPS, prenorm=True)


def _add_reference(x, residual, weight):
    total = x + residual
    return references.rms_norm(total, weight, EPS), total


def _gated(function, x, z, weight):
    return function(x, weight, None, z=z, eps=EPS, norm_before_gate=False)


def _gated_reference(x, z, weight):
    return references.gated_rms_norm(x, z, weight, EPS)


# kind: (where its function is, its call, its reference, the name of the second input)
KINDS = {
    "add": ("mamba_ssm.ops.triton.layer_norm:rms_norm_fn", _add, _add_reference, "residual"),
    "gated": ("mamba_ssm.ops.triton.layernorm_gated:rmsnorm_fn", _gated, _gated_reference, "z"),
}


def _inputs(case, device, seed=0):
    normal, dtype = normals(device, seed), dtype_of(case)
    x, second = normal(case.rows, case.width, dtype=dtype), normal(case.rows, case.width)
    second = second if case.kind == "add" else second.to(dtype)
    return {"x": x, KINDS[case.kind][3]: second, "weight": normal(case.width)}


def prepare(case, device, side):
    place, call, reference, second = KINDS[case.kind]
    function = partial(call, side.function(place))
    sets = input_sets(partial(_inputs, case, device), device)
    check_with_gradients(side, function, reference, sets[0], ("x", second), min(VALIDATED_ROWS, case.rows))
    return differentiable_calls(function, sets, case.passes)
