"""The GPU's sections: scan, conv, decode, small. Each validates, then times, and returns rows of figures."""

import cases
import progress
import torch
from timing import gpu_milliseconds, graph_microseconds, input_sets, tensor_bytes, wall_microseconds
from validate import check, scan_and_gradients

from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref

GRADIENTS_OF_DTYPE = ("u", "delta", "B", "C", "z")  # the others are float32


def _backward(out, leaves, dout):
    return torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _silu_conv(x, weight, bias):
    return causal_conv1d_fn(x, weight, bias, activation="silu")


def _validate_scan(case, inputs):
    """Check out and every gradient of the call that is timed.

    Only the last batch entry's output counts, so that the gradients summed over the batch are that entry's.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = selective_scan_fn(**leaves, delta_softplus=True)
    dout = torch.zeros_like(out)
    dout[-1].normal_()
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))
    expected = scan_and_gradients(inputs, dout, -1)
    check("out", out[-1], expected["out"], case.dtype)
    for name, gradient in gradients.items():
        got = gradient[-1] if name in GRADIENTS_OF_DTYPE else gradient
        # Sums of products of rounded inputs: exact inputs, so float32 accuracy, but for the ones stored in case.dtype.
        check(f"d{name}", got, expected[name], case.dtype if name in GRADIENTS_OF_DTYPE else torch.float32)


def scan(machine):
    rows = []
    for case in cases.SCANS:
        progress.show(case.name)
        first = cases.scan_inputs(case, "cuda")
        _validate_scan(case, first)
        big = [first[name] for name in ("u", "delta", "z", "B", "C")]
        sets = input_sets(lambda seed, case=case: cases.scan_inputs(case, "cuda", seed), tensor_bytes(big))

        def forward(inputs):
            return selective_scan_fn(**inputs, delta_softplus=True)

        with torch.no_grad():
            inference = gpu_milliseconds(forward, [(inputs,) for inputs in sets])
        training = []
        for inputs in sets:
            leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
            training.append((leaves,))
        forward_ms = gpu_milliseconds(forward, training)
        graphs = []
        for (leaves,) in training:
            out = forward(leaves)
            graphs.append((out, list(leaves.values()), torch.randn_like(out)))
        backward_ms = gpu_milliseconds(_backward, graphs)
        floor = case.batch * case.dim * case.seqlen * case.dstate / machine["exponentials_per_s"] * 1e3
        moved = tensor_bytes([*big, first["u"]])  # out is like u
        rows.append(
            {
                "case": case.name,
                "fwd ms": forward_ms,
                "fwd no grad ms": inference,
                "bwd ms": backward_ms,
                "upstream fwd": case.upstream_forward,
                "upstream bwd": case.upstream_backward,
                "fwd x": case.upstream_forward / forward_ms,
                "bwd x": case.upstream_backward / backward_ms,
                "goal x": case.goal,
                "exp floor ms": floor,
                "fwd of copy": moved / forward_ms * 1e-6 / machine["copy_gb_per_s"],
            }
        )
        del sets, training, graphs, leaves, out, first, big
    return rows


def conv(machine):
    rows = []
    for batch, seqlen, dim, channel_last, upstream in cases.CONVS:
        progress.show(f"B{batch} L{seqlen} D{dim}")
        shape = (batch, seqlen, dim) if channel_last else (batch, dim, seqlen)
        x = torch.randn(shape, device="cuda").to(torch.bfloat16)
        x = x.transpose(1, 2) if channel_last else x
        weight = torch.randn(dim, 4, device="cuda").mul_(0.5).to(torch.bfloat16)
        bias = torch.randn(dim, device="cuda").to(torch.bfloat16)
        with torch.no_grad():
            some = slice(dim - 64, dim)
            wide = torch.nn.functional.conv1d(
                x[:, some].double(), weight[some, None].double(), bias[some].double(), padding=3, groups=64
            )[..., :seqlen]
            check("conv", _silu_conv(x, weight, bias)[:, some], wide * wide.sigmoid(), x.dtype)
            forward_ms = gpu_milliseconds(_silu_conv, [(x, weight, bias)])
        leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
        out = _silu_conv(*leaves)
        dout = torch.randn_like(out)
        _validate_conv_gradients(leaves, out, dout)
        backward_ms = gpu_milliseconds(_backward, [(out, leaves, dout)])
        size = tensor_bytes([x])
        rows.append(
            {
                "case": f"B{batch} L{seqlen} D{dim} {'channel-last' if channel_last else 'time-last'}",
                "fwd ms": forward_ms,
                "fwd of copy": 2 * size / forward_ms * 1e-6 / machine["copy_gb_per_s"],
                "goal": cases.CONV_GOAL_OF_COPY,
                "upstream fwd": upstream,
                "bwd ms": backward_ms,
                "bwd of copy": 3 * size / backward_ms * 1e-6 / machine["copy_gb_per_s"],
            }
        )
    return rows


def _validate_conv_gradients(leaves, out, dout):
    """All of dx, dweight and dbias for the last 64 channels."""
    gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    some = slice(out.shape[1] - 64, out.shape[1])
    x, weight, bias = leaves
    wide = [t.detach().double().requires_grad_() for t in (x[:, some], weight[some, None], bias[some])]
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(*wide, padding=3, groups=64)[..., : out.shape[2]])
    references = torch.autograd.grad(expected, wide, dout[:, some].double())
    check("conv dx", gradients[0][:, some], references[0], out.dtype)
    check("conv dweight", gradients[1][some], references[1][:, 0], out.dtype)
    check("conv dbias", gradients[2][some], references[2], out.dtype)


def _decode_inputs(batch, dim, dstate, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    return (
        normal(batch, dim, dstate, dtype=torch.float32),
        normal(batch, dim),
        normal(batch, dim) * 0.5 - 4.0,
        -torch.arange(1, dstate + 1, device="cuda", dtype=torch.float32).repeat(dim, 1),
        normal(batch, dstate),
        normal(batch, dstate),
        normal(dim, dtype=torch.float32),
        normal(batch, dim),
        normal(dim, dtype=torch.float32) * 0.5,
    )


def decode(machine):
    rows = []
    for batch, dim, dstate, upstream in cases.DECODES:
        progress.show(f"B{batch} D{dim} N{dstate}")
        inputs = _decode_inputs(batch, dim, dstate, 0)
        state, rest = inputs[0].clone(), inputs[1:]
        wide_state, wide_rest = inputs[0].double(), [tensor.double() for tensor in rest]
        out = selective_state_update(state, *rest, dt_softplus=True)
        check("decode out", out, selective_state_update_ref(wide_state, *wide_rest, dt_softplus=True), torch.bfloat16)
        check("decode state", state, wide_state, torch.float32)

        def step(*arguments):
            selective_state_update(*arguments, dt_softplus=True)

        sets = input_sets(
            lambda seed, size=(batch, dim, dstate): _decode_inputs(*size, seed), 2 * tensor_bytes([state])
        )
        kernel_us = graph_microseconds(step, sets)
        moved = 2 * tensor_bytes([state])
        rows.append(
            {
                "case": f"B{batch} D{dim} N{dstate}",
                "call us": wall_microseconds(lambda inputs=inputs, step=step: step(*inputs), synchronize=True),
                "upstream call us": upstream,
                "call goal us": cases.DECODE_CALL_GOAL_US if batch == 1 else None,
                "kernel us": kernel_us,
                "kernel goal us": cases.DECODE_KERNEL_GOAL_US if batch == 1 else None,
                "kernel of copy": moved / kernel_us * 1e-3 / machine["copy_gb_per_s"],
            }
        )
    return rows


def small(machine):
    case = cases.SMALL_SCAN
    inputs = cases.scan_inputs(case, "cuda")
    _validate_scan(case, inputs)
    with torch.no_grad():
        forward_us = wall_microseconds(lambda: selective_scan_fn(**inputs, delta_softplus=True), synchronize=True)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    wanted = list(leaves.values())
    dout = torch.ones_like(inputs["u"])

    def both():
        torch.autograd.grad(selective_scan_fn(**leaves, delta_softplus=True), wanted, dout)

    return [
        {
            "case": f"selective_scan_fn {case.name}",
            "no grad us": forward_us,
            "goal us": cases.SMALL_FORWARD_GOAL_US,
            "fwd+bwd us": wall_microseconds(both, synchronize=True),
            "fwd+bwd goal us": cases.SMALL_BOTH_GOAL_US,
        }
    ]
