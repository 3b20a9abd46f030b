"""The norms' section: forward and backward beside the copy bandwidth, and what a call on one row costs."""

from functools import partial

import cases
import progress
import torch
from timing import gpu_milliseconds, input_sets, tensor_bytes, wall_microseconds
from validate import check

from mamba_ssm.ops.norm.reference import gated_rms_norm_ref, rms_norm_ref
from mamba_ssm.ops.triton.layer_norm import rms_norm_fn
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

VALIDATED_ROWS = 512


def _add_norm(x, residual, weight):
    return rms_norm_fn(x, weight, None, residual, prenorm=True)


def _gated_norm(x, z, weight):
    return (rmsnorm_fn(x, weight, None, z, norm_before_gate=False),)


def _add_norm_ref(x, residual, weight):
    return rms_norm_ref(x, weight, None, residual, prenorm=True)


def _gated_norm_ref(x, z, weight):
    return (gated_rms_norm_ref(x, weight, None, z, norm_before_gate=False),)


# name, function, reference, dtype of the second input, bytes an element that forward and backward read and write:
# add: x, residual, out, sum; dout, dsum, sum, dx, dresidual. gated: x, z, out; dout, x, z, dx, dz.
KINDS = [
    ("add + RMSNorm", _add_norm, _add_norm_ref, torch.float32, 12, 16),
    ("gated RMSNorm", _gated_norm, _gated_norm_ref, torch.bfloat16, 6, 10),
]


def _inputs(rows, width, dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x, second = (torch.randn(rows, width, device="cuda", generator=generator) for _ in range(2))
    weight = torch.randn(width, device="cuda", generator=generator)
    return [tensor.requires_grad_() for tensor in (x.to(torch.bfloat16), second.to(dtype), weight)]


def _backward(outputs, leaves, gradients):
    return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)


def _validate(name, function, reference, leaves):
    """Outputs and every gradient where only the last rows' outputs count."""
    outputs = function(*leaves)
    gradients = [torch.zeros_like(output) for output in outputs]
    for gradient in gradients:
        gradient[-VALIDATED_ROWS:].normal_()
    found = _backward(outputs, leaves, gradients)
    some = [leaf.detach()[-VALIDATED_ROWS:].double().requires_grad_() for leaf in leaves[:2]]
    some.append(leaves[2].detach().double().requires_grad_())
    expected = reference(*some)
    last = [gradient[-VALIDATED_ROWS:].double() for gradient in gradients]
    references = torch.autograd.grad(expected, some, last)
    for i, output in enumerate(outputs):
        check(f"{name} output {i}", output[-VALIDATED_ROWS:], expected[i], output.dtype)
    for i, (gradient, wanted) in enumerate(zip(found, references, strict=True)):
        got = gradient if i == 2 else gradient[-VALIDATED_ROWS:]
        check(f"{name} gradient {i}", got, wanted, gradient.dtype)


def norm(machine):
    rows = []
    for name, function, reference, dtype, forward_bytes, backward_bytes in KINDS:
        for count, width in cases.NORMS:
            progress.show(f"{name} {count} x {width}")
            make = partial(_inputs, count, width, dtype)
            first = make(0)
            _validate(name, function, reference, first)
            sets = input_sets(make, tensor_bytes(first))
            with torch.no_grad():
                inference_ms = gpu_milliseconds(function, sets)
            forward_ms = gpu_milliseconds(function, sets)
            graphs = []
            for leaves in sets:
                outputs = function(*leaves)
                graphs.append((outputs, leaves, [torch.randn_like(output) for output in outputs]))
            backward_ms = gpu_milliseconds(_backward, graphs)
            one = _inputs(1, width, dtype, 0)
            with torch.no_grad():
                call_us = wall_microseconds(lambda one=one, function=function: function(*one), synchronize=True)
            of_copy = count * width * 1e-6 / machine["copy_gb_per_s"]
            rows.append(
                {
                    "case": f"{name} {count} x {width}",
                    "fwd ms": forward_ms,
                    "fwd no grad ms": inference_ms,
                    "bwd ms": backward_ms,
                    "fwd of copy": forward_bytes * of_copy / forward_ms,
                    "bwd of copy": backward_bytes * of_copy / backward_ms,
                    "goal": cases.NORM_GOAL_OF_COPY,
                    "one row, call us": call_us,
                }
            )
    return rows
