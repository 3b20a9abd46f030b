"""Gated LayerNorm/RMSNorm with groups against the reference: values, gradients, views, wrong arguments."""

import concurrent.futures
from functools import partial

import pytest
import torch
from _helpers.cases import DTYPES, NORM_WIDTHS, assert_close_to_truth, dtype_id, norm_rows, outputs_and_gradients

from mamba_ssm.ops.norm import gated_norm_ref
from mamba_ssm.ops.triton.layernorm_gated import (
    LayerNorm,
    RMSNorm,
    _layer_norm_bwd,
    _layer_norm_fwd,
    layernorm_fn,
    rms_norm_ref,
    rmsnorm_fn,
)

# (shape, group size): one element a group, odd ones, many groups, groups of a block, groups longer than 16384.
SHAPES = [((1, 1), None), ((3, 6), 1), ((2, 3, 15), 5), ((2, 5, 96), 24), ((300, 64), 16), ((4, 250), 125)]
SHAPES += [((9, 1536), None), ((5, 2048), 512), ((2, 4, 12288), 4096), ((3, 5120), None), ((2, 2, 8250), 4125)]
SHAPES += [((2, 16640), None), ((2, 65540), 32770), ((0, 16), 8), ((3, 0), None)]
GATES = [{}, {"z": "same"}, {"z": "same", "norm_before_gate": False}, {"z": "float32"}]
GATES += [{"z": "float32", "norm_before_gate": False}]


def inputs(shape, options, dtype, device, weight_dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    z_dtype = {"same": dtype, "float32": torch.float32, "float16": torch.float16}.get(options.get("z"))
    return {
        "x": normal(*shape) + 0.5,
        "weight": normal(shape[-1], dtype=weight_dtype),
        "bias": normal(shape[-1], dtype=weight_dtype) if bias else None,
        "z": normal(*shape, dtype=z_dtype) if z_dtype else None,
    }


def check(tensors, **options):
    reference = partial(gated_norm_ref, eps=1e-5, **options)
    found = outputs_and_gradients(partial(layernorm_fn, eps=1e-5, **options), tensors)
    assert found["out0"].dtype == tensors["x"].dtype
    for name, value in tensors.items():
        if value is not None:
            assert found["d" + name].dtype == value.dtype
    plain = outputs_and_gradients(reference, tensors)
    assert_close_to_truth(found, plain, outputs_and_gradients(reference, tensors, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape,group_size", SHAPES, ids=str)
def test_shapes(shape, group_size, dtype, device):
    for options in ({"norm_before_gate": False, "is_rms_norm": True}, {"norm_before_gate": True, "is_rms_norm": False}):
        tensors = inputs(shape, {"z": "same"}, dtype, device, bias=not options["is_rms_norm"])
        check(tensors, group_size=group_size, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_many_rows(width, dtype, device):
    shape = (norm_rows(width, device), width)
    check(inputs(shape, {"z": "same"}, dtype, device, bias=False), norm_before_gate=False, is_rms_norm=True)
    check(inputs(shape, {"z": "float32"}, dtype, device), norm_before_gate=True, is_rms_norm=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_options(gate, bias, is_rms_norm, dtype, device):
    tensors = inputs((3, 7, 64), gate, dtype, device, bias=bias)
    before = gate.get("norm_before_gate", True)
    for group_size in (None, 16):
        check(tensors, group_size=group_size, norm_before_gate=before, is_rms_norm=is_rms_norm)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=dtype_id)
def test_weight_and_gate_of_other_dtypes(weight_dtype, device):
    tensors = inputs((5, 96), {"z": "float16"}, torch.bfloat16, device, weight_dtype)
    check(tensors, group_size=32)


def test_views_of_one_projection(device):
    """Mamba-2 normalises with x and z that are slices of one wider tensor, whatever its width."""
    for width in (200, 202, 203):
        zxbcdt = torch.randn(2, 7, width, device=device)
        z, x = zxbcdt[..., :64].requires_grad_(), zxbcdt[..., 64:128].detach().requires_grad_()
        weight = torch.randn(64, device=device)
        copies = [tensor.detach().clone().requires_grad_() for tensor in (x, z)]
        for before in (True, False):
            out = rmsnorm_fn(x, weight, None, z, norm_before_gate=before)
            expected = rmsnorm_fn(copies[0], weight, None, copies[1], norm_before_gate=before)
            torch.testing.assert_close(out, expected)
            dout = torch.randn(7, 2, 64, device=device).transpose(0, 1)
            grads = torch.autograd.grad(out, (x, z), dout)
            torch.testing.assert_close(grads, torch.autograd.grad(expected, copies, dout))


def test_nan_stays_in_its_group(device):
    x, z = torch.randn(2, 3, 24, device=device)
    weight = torch.randn(24, device=device)
    weight[9] = float("nan")
    x[1, 20] = float("nan")
    out = rmsnorm_fn(x, weight, None, z, group_size=6)
    assert out[1, 18:].isnan().all()
    assert out.isnan().sum() == 6 + 3
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(rmsnorm_fn(leaf, weight, None, z, group_size=6).sum(), leaf)
    expected = torch.zeros(3, 24, dtype=torch.bool, device=device)
    expected[:, 6:12] = True
    expected[1, 18:] = True
    assert torch.equal(grad.isnan(), expected)


@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_modules(module, device):
    norm = module(48, eps=1e-3, group_size=12, norm_before_gate=False, device=device, dtype=torch.bfloat16)
    assert set(norm.state_dict()) == ({"weight", "bias"} if module is LayerNorm else {"weight"})
    assert norm.weight.eq(1).all()
    with torch.no_grad():
        norm.weight.normal_()
    x, z = torch.randn(2, 5, 48, device=device).bfloat16()
    options = {"eps": 1e-3, "group_size": 12, "norm_before_gate": False}
    expected = gated_norm_ref(x, norm.weight, norm.bias, z, **options, is_rms_norm=module is RMSNorm)
    torch.testing.assert_close(norm(x, z), expected)
    assert norm(x).shape == x.shape


def test_reference_of_upstreams_name():
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.nn.functional.layer_norm(x - x.mean(-1, keepdim=True), (8,), weight)
    torch.testing.assert_close(rms_norm_ref(x - x.mean(-1, keepdim=True), weight, None, eps=1e-5), expected)


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "x must be float32, float16 or bfloat16, got int64"),
        ({"z": torch.zeros(3, 7)}, ValueError, r"z must have shape \(\.\.\., N\) = \(3, 8\), got \(3, 7\)"),
        ({"z": torch.zeros(3, 8).double()}, TypeError, "z must have the dtype of x, float32, got float64"),
        ({"weight": torch.zeros(9)}, ValueError, r"weight must have shape \(N,\) = \(8,\), got \(9,\)"),
        ({"bias": torch.zeros(9)}, ValueError, r"bias must have shape \(N,\) = \(8,\), got \(9,\)"),
        ({"group_size": 3}, ValueError, "group_size must divide the last dimension of x, 8, got 3"),
        ({"group_size": 0}, ValueError, "group_size must divide the last dimension of x, 8, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments(change, error, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(8), "bias": None, "z": torch.zeros(3, 8)}
    with pytest.raises(error, match=message):
        layernorm_fn(**{**arguments, **change})


@pytest.mark.parametrize("before", [True, False], ids=["norm_first", "gate_first"])
@pytest.mark.parametrize("is_rms_norm", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize("z", [True, False], ids=["gate", "no_gate"])
def test_the_two_directions(z, is_rms_norm, before, device):
    """_layer_norm_fwd and _layer_norm_bwd: upstream's results, whose statistics lie group after group."""
    x, dy = torch.randn(2, 6, 12, device=device)
    gate = torch.randn(6, 12, device=device) if z else None
    weight = torch.randn(12, device=device)
    bias = None if is_rms_norm else torch.randn(12, device=device)
    options = {"z": gate, "group_size": 4, "norm_before_gate": before, "is_rms_norm": is_rms_norm}
    target = torch.empty_like(x)
    out, mean, rstd = _layer_norm_fwd(x, weight, bias, 1e-5, out=target, **options)
    assert out is target
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias, gate) if tensor is not None]
    given = iter(leaves)
    arguments = [None if tensor is None else next(given) for tensor in (x, weight, bias, gate)]
    expected = layernorm_fn(*arguments, 1e-5, 4, before, is_rms_norm)
    torch.testing.assert_close(out, expected.detach())
    normed = x if gate is None or before else x * torch.nn.functional.silu(gate)
    groups = normed.unflatten(-1, (3, 4)).transpose(0, 1)  # (groups, rows, 4)
    if not is_rms_norm:
        torch.testing.assert_close(mean, groups.mean(-1).flatten())
        groups = groups - groups.mean(-1, keepdim=True)
    assert (mean is None) == is_rms_norm
    torch.testing.assert_close(rstd, torch.rsqrt(groups.square().mean(-1) + 1e-5).flatten())

    dz = torch.empty_like(x) if z else None
    *found, again = _layer_norm_bwd(
        dy, x, weight, bias, 1e-5, mean, rstd, **options, recompute_output=True, dz=dz, out=target
    )
    assert again is target and found[3] is dz and len(found) == 4
    assert len(_layer_norm_bwd(dy, x, weight, bias, 1e-5, mean, rstd, **options)) == 4
    torch.testing.assert_close(again, out)
    gradients = torch.autograd.grad(expected, leaves, dy)
    found = [gradient for gradient in found if gradient is not None]
    for gradient, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, other)
    with pytest.raises(ValueError, match=r"layernorm_gated: out must have shape \(6, 12\), got \(6, 11\)"):
        _layer_norm_fwd(x, weight, bias, 1e-5, out=target[:, 1:], **options)


@pytest.mark.gpu
def test_threads_that_need_different_amounts_of_shared_memory(cuda_kernels):
    """What a kernel may have is the process's: a call of another thread must not leave this one with less."""

    def backward(width):
        x, z, dy = torch.randn(3, 64, width, generator=torch.Generator().manual_seed(width)).to(cuda_kernels).unbind()
        weight = torch.ones(width, device=cuda_kernels)
        _, mean, rstd = _layer_norm_fwd(x, weight, None, 1e-5, z=z, is_rms_norm=True)
        return _layer_norm_bwd(dy, x, weight, None, 1e-5, mean, rstd, z=z, is_rms_norm=True)[0]

    widths = 4096, 256, 1024, 2048
    expected = [backward(width) for width in widths]
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        for width, result in zip(reversed(widths), reversed(expected), strict=True):
            assert torch.equal(other.submit(backward, width).result(), result)
    for width, result in zip(widths, expected, strict=True):
        assert torch.equal(backward(width), result)
