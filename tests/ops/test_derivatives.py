"""Derivatives beyond the first of reverse mode: double backward, forward mode, torch.func, against float64 plain torch.

Kernels give results and first gradients in float32, formulas the rest: an error is a few float32 roundings of sums as
long as the sequence, relative to a tensor's largest element.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from _helpers.cases import ConvCase, ScanCase, SsdCase

from mamba_ssm.ops._shared.recurrence import Recurrence, _recur_in_pieces, recur_
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.norm import layer_norm_fn, layernorm_fn, rmsnorm_fn, swiglu
from mamba_ssm.ops.selective_scan import double_backward, double_blocks, selective_scan_fn
from mamba_ssm.ops.selective_scan.double_blocks import in_blocks
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined
from mamba_ssm.utils.reference import plain_torch

CLOSE = 1e-5


def scan(softplus=True, last=True, **options):
    def inputs():
        sizes = {"batch": 2, "dim": 6, "seqlen": 37}
        return ScanCase(**{**sizes, **options}, softplus=False).inputs(torch.float32, "cpu")

    def run(reverse=False, **tensors):
        return selective_scan_fn(**tensors, delta_softplus=softplus, return_last_state=last, reverse=reverse)

    return run, inputs()


def bare_scan(**options):
    return scan(softplus=False, D=False, z=False, delta_bias=False, **options)


def backwards(case):
    run, tensors = case
    return lambda **given: run(reverse=True, **given), tensors


def conv(**options):
    reverse = options.pop("reverse", False)
    tensors = ConvCase(2, 6, 9, **options).inputs(torch.float32, "cpu")
    options = {name: tensors.pop(name) for name in list(tensors) if not isinstance(tensors[name], torch.Tensor)}
    return lambda **given: causal_conv1d_fn(**given, **options, reverse=reverse), tensors


def padded(case):
    """The first steps of one row, and the last of the other."""
    run, tensors = case
    tensors["seq_idx"][0, :3] = tensors["seq_idx"][1, -4:] = -1
    return run, tensors


def norm(function, names, **options):
    def run(weight, bias=None, **given):
        return function(given.pop("x"), weight, bias, **given, **options)

    return run, {name: torch.randn(*(() if name in ("weight", "bias") else (3,)), 8) for name in names.split()}


def ssd(seqlen, **options):
    tensors = SsdCase(2, seqlen, 4, 3, 5, 2, **options).inputs(torch.float32, "cpu")
    return lambda **given: mamba_chunk_scan_combined(**given, chunk_size=64, dt_softplus=True), tensors


CASES = {
    "scan": lambda: scan(initial_state=True, seq_idx=True, groups=2),
    "scan_backwards": lambda: backwards(scan(initial_state=True, seq_idx=True)),
    "scan_bare": lambda: bare_scan(last=False),
    "scan_bare_state": lambda: backwards(bare_scan(initial_state=True, groups=3)),
    "scan_of_constants": lambda: scan(seqlen=9, dstate=4, variable_B=False, groups=2),
    "scan_of_tiles": lambda: scan(seqlen=150, dstate=3, seq_idx=True, initial_state=True),
    "scan_one_step": lambda: scan(seqlen=1),
    "conv": lambda: conv(initial_states=True),
    "conv_backwards": lambda: conv(width=3, reverse=True),
    "conv_packed": lambda: conv(width=2, seq_idx=True),
    "conv_padded": lambda: padded(conv(seq_idx=True, initial_states=True)),
    "conv_states": lambda: conv(initial_states=True, final_states=True, channel_last=True),
    "conv_without_silu": lambda: conv(silu=False, final_states=True, initial_states=True, reverse=True),
    "conv_without_bias": lambda: conv(bias=False),
    "layer_norm": lambda: norm(layer_norm_fn, "x weight bias residual", prenorm=True),
    "rms_norm": lambda: norm(layer_norm_fn, "x weight", is_rms_norm=True),
    "gated_layer_norm": lambda: norm(layernorm_fn, "x weight bias z", norm_before_gate=False),
    "gated_rms_norm": lambda: norm(rmsnorm_fn, "x weight z", group_size=4),
    "swiglu": lambda: (lambda x: swiglu(x), {"x": torch.randn(3, 8)}),
    "ssd": lambda: ssd(70),
    "ssd_one_step": lambda: ssd(1),
}


@pytest.fixture(params=CASES)
def case(request, device):
    torch.manual_seed(0)
    run, tensors = CASES[request.param]()
    return run, {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}


def is_real(tensor):
    return tensor.is_floating_point()


def outputs(run, tensors):
    results = run(**tensors)
    return [result for result in (results if isinstance(results, tuple) else (results,)) if result is not None]


def double(tensors):
    return {name: tensor.double() if is_real(tensor) else tensor for name, tensor in tensors.items()}


def weighted(tensors, seed):
    """A sum with fixed weights, the same for each dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(tensor.shape, generator=generator) for tensor in tensors)
    return sum((tensor * weight.to(tensor)).sum() for tensor, weight in zip(tensors, weights, strict=True))


def grads(result, leaves, create_graph=False):
    found = torch.autograd.grad(result, leaves, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]


def second_derivatives(run, tensors):
    tensors = {name: tensor.detach().requires_grad_(is_real(tensor)) for name, tensor in tensors.items()}
    leaves = [tensor for tensor in tensors.values() if is_real(tensor)]
    results = outputs(run, tensors)
    first = grads(weighted([result.sin() for result in results], 1), leaves, create_graph=True)
    return grads(weighted(first, 2) + first[0].square().sum(), leaves)


def assert_close(found, expected, bound=CLOSE):
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=1e-3) if other.numel() else 1.0
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=bound)


def test_double_backward(case):
    run, tensors = case
    found = second_derivatives(run, tensors)
    with plain_torch():
        expected = second_derivatives(run, double(tensors))
    assert_close(found, expected)


def test_torch_func_and_forward_mode(case):
    """grad, jvp, Hessian-vector products in three orders of the two modes, vmap inside and outside of grad."""
    run, tensors = case
    name, x = next(iter(tensors.items()))
    v, many = torch.randn_like(x), torch.stack([x, -x])

    def results(tensors, x, v, many):
        def out(x):
            return outputs(run, {**tensors, name: x})[0]

        def loss(x):
            return out(x).sin().sum()

        grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap
        return (
            grad(loss)(x),
            jvp(out, (x,), (v,))[1],
            jvp(grad(loss), (x,), (v,))[1],
            grad(lambda x: (grad(loss)(x) * v).sum())(x),
            grad(lambda x: jvp(loss, (x,), (v,))[1])(x),
            vmap(grad(loss))(many),
            grad(lambda many: vmap(out)(many).sin().sum())(many),
            vmap(lambda x: jvp(grad(loss), (x,), (v,))[1])(many),
        )

    found = results(tensors, x, v, many)
    with plain_torch():
        expected = results(double(tensors), x.double(), v.double(), many.double())
    assert_close(found, expected)
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(outputs(run, {**tensors, name: forward_ad.make_dual(x, v)})[0])
    assert_close([tangent], expected[1:2])
    torch.testing.assert_close(primal, outputs(run, tensors)[0])


@pytest.mark.parametrize("name", ["scan", "conv", "gated_rms_norm", "layer_norm"])
def test_plain_torch_in_float64(name):
    run, tensors = scan(seqlen=4, dstate=2) if name == "scan" else CASES[name]()
    tensors = double({key: tensor for key, tensor in tensors.items() if tensor is not None})
    leaves = [tensor.requires_grad_() for tensor in tensors.values() if is_real(tensor)]

    def function(*leaves):
        given = iter(leaves)
        return tuple(outputs(run, {key: next(given) if is_real(t) else t for key, t in tensors.items()}))

    with plain_torch():
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["scan", "conv"])
def test_double_backward_in_sixteen_bits(name, dtype, device):
    """First gradients are rounded to 16 bits, so that second ones have the error of several of these roundings."""
    run, tensors = CASES[name]()
    narrow = {
        key: tensor.to(device, dtype if key in ("u", "delta", "B", "C", "z", "x", "initial_states") else tensor.dtype)
        for key, tensor in tensors.items()
        if tensor is not None
    }
    found = second_derivatives(run, narrow)
    with plain_torch():
        expected = second_derivatives(run, double(narrow))
    assert_close(found, expected, bound=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("block", [1, 100, 400, 1 << 26])
@pytest.mark.parametrize("name", ["scan", "scan_backwards"])
def test_blocks_of_steps_and_channels(name, block, monkeypatch):
    """What runs on CUDA, on the CPU."""
    run, tensors = CASES[name]()
    expected = second_derivatives(run, tensors)
    monkeypatch.setattr(double_backward, "on_cpu", lambda given, found, _, reverse: in_blocks(given, found, reverse))
    monkeypatch.setattr(double_blocks, "_BLOCK", block)
    monkeypatch.setattr(double_blocks, "_STEPS", 3)
    assert_close(second_derivatives(run, tensors), [tensor.double() for tensor in expected])


@pytest.mark.parametrize("reverse", [False, True])
def test_second_derivatives_of_the_scan_by_threads(reverse):
    """Threads share out channels of one group, so that the gradients of B and C are sums of several parts."""
    run, tensors = bare_scan(seqlen=300, dstate=7, dim=70, batch=3, seq_idx=True, initial_state=True)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        found = second_derivatives(lambda **given: run(reverse=reverse, **given), tensors)
    finally:
        torch.set_num_threads(threads)
    with plain_torch():
        expected = second_derivatives(lambda **given: run(reverse=reverse, **given), double(tensors))
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["scan", "conv", "rms_norm", "ssd"])
def test_third_derivatives(name, device):
    run, tensors = CASES[name]()
    tensors = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
    key, x = next(iter(tensors.items()))

    def third(tensors, x):
        x = x.detach().requires_grad_()
        out = outputs(run, {**tensors, key: x})[0]
        (first,) = torch.autograd.grad(weighted([out.sin()], 1), x, create_graph=True)
        (second,) = torch.autograd.grad(weighted([first], 2), x, create_graph=True)
        return torch.autograd.grad(weighted([second], 3), x)

    found = third(tensors, x)
    with plain_torch():
        expected = third(double(tensors), x.double())
    assert_close(found, expected)


def test_one_tensor_as_two_arguments(device):
    """B and C, or u and z, may be one tensor: its gradient is the sum of two."""
    x, A = torch.rand(2, 4, 20, device=device), -torch.rand(4, 4, device=device) - 1

    def run(x, A):
        return selective_scan_fn(x, x, A, x, x, z=x)

    found = second_derivatives(run, {"x": x, "A": A})
    with plain_torch():
        expected = second_derivatives(run, {"x": x.double(), "A": A.double()})
    assert_close(found, expected)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 4, 0)])
def test_empty(shape, device):
    u, matrix = torch.randn(shape, device=device), torch.randn(shape[0], 3, shape[2], device=device)
    state, A = torch.randn(shape[0], 4, 3, device=device), -torch.rand(4, 3, device=device)
    tensors = {"initial_state": state, "u": u, "delta": u.abs(), "A": A, "B": matrix, "C": matrix}

    def run(**tensors):
        return selective_scan_fn(**tensors, return_last_state=True)

    found = second_derivatives(run, tensors)
    with plain_torch():
        expected = second_derivatives(run, double(tensors))
    assert_close(found, expected)


# ---- the recurrence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_recurrence(reverse):
    a, b = torch.rand(5, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    leaves = a.requires_grad_(), b.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: Recurrence.apply(a, b, reverse), leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda a, b: Recurrence.apply(a, b, reverse), leaves)
    many = torch.randn(2, 6, 3, dtype=torch.float64)
    mapped = torch.func.vmap(lambda b: Recurrence.apply(a, b, reverse), in_dims=2, out_dims=2)(many.transpose(0, 1))
    expected = [Recurrence.apply(a, b, reverse) for b in many.transpose(0, 1).unbind(2)]
    torch.testing.assert_close(mapped, torch.stack(expected, 2))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [9, 16, 17, 31, 127])
def test_recurrence_in_pieces(length, reverse):
    a, b = torch.rand(length - 1, 3, dtype=torch.float64), torch.randn(length, 3, dtype=torch.float64)
    torch.testing.assert_close(_recur_in_pieces(a, b.clone(), reverse), recur_(a, b.clone(), reverse))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_vectorized_hessians(device):
    tensors = {name: tensor.to(device) for name, tensor in bare_scan(seqlen=3)[1].items() if tensor is not None}

    def run(u):
        return selective_scan_fn(**{**tensors, "u": u}).sin().sum()

    u = tensors["u"]
    torch.testing.assert_close(torch.func.hessian(run)(u), torch.autograd.functional.hessian(run, u))
    with pytest.raises(RuntimeError, match=r"use torch\.func, such as"):
        torch.autograd.functional.hessian(run, u, vectorize=True)


def test_operators_themselves_refuse(device):
    """torch.ops... are called by programs that were exported; the public functions have these derivatives."""
    x = torch.randn(2, 8, device=device)
    with pytest.raises(RuntimeError, match=r"does not work with torch\.func transforms .* call the public function"):
        torch.func.grad(lambda x: torch.ops.mamba_ssm.swiglu(x).sum())(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.ops.mamba_ssm.swiglu(forward_ad.make_dual(x, x))
