"""Weights of int8: how they are rounded, and the product by them for few rows and many, with its gradients."""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from _helpers.cases import DTYPES, dtype_id
from torch._subclasses.fake_tensor import FakeTensorMode

from mamba_ssm.ops.linear import (
    dequantize,
    dequantize_ref,
    linear,
    normed_linear,
    project,
    quantize_weight,
    quantized_linear,
    takes_norm,
)
from mamba_ssm.ops.norm import rms_norm_fn
from mamba_ssm.utils.kernels import without
from mamba_ssm.utils.reference import plain_torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# rows, in, out: all kernels of mamba_cuda, whole vectors and not, outputs beyond those that blocks begin with, and more
# rows than the operator takes
SIZES = [(1, 768, 100), (1, 1536, 33), (1, 32, 6400), (1, 4112, 20), (1, 8208, 3), (1, 16, 1), (1, 1, 1)]
SIZES += [(1, 1537, 33), (2, 70, 65), (4, 512, 9), (5, 2080, 17), (8, 264, 130), (19, 96, 33)]
SIZES += [(9, 33, 64000)]  # in pieces on the CPU


def weight_of(out_features, in_features, device="cpu", scale=1.0):
    weight, scales = quantize_weight(torch.randn(out_features, in_features) * scale)
    return weight.to(device), scales.to(device)


def test_a_weight_is_rounded_as_q8_0_is():
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    weight = torch.randn(40, 96)
    weight[3, 32:64] = 0
    weight[4] *= 1e-6  # scales below float16's normal numbers
    weight[5, :32] = torch.arange(32) * 2.0 + 1
    weight[5, 0] = 2 * 127  # then halves
    values, scales = quantize_weight(weight)
    blocks = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0).reshape(40, 3, 34)
    assert numpy.array_equal(blocks[..., 2:].view(numpy.int8).reshape(40, 96), values.numpy())
    assert numpy.array_equal(blocks[..., :2].copy().view(numpy.float16).reshape(40, 3), scales.numpy())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("in_features", [1, 32, 45, 96])
def test_errors_of_rounding(in_features, dtype):
    """At most half a step of a scale, 1/254 of a block's largest weight, and the roundings of scale and dtype."""
    weight = torch.randn(7, in_features, dtype=torch.float64)
    values, scales = quantize_weight(weight)
    assert values.dtype == torch.int8 and scales.dtype == torch.float16
    assert values.shape == weight.shape and scales.shape == (7, -(-in_features // 32))
    found = dequantize_ref(values, scales, dtype)
    assert found.dtype == dtype and found.shape == weight.shape
    largest = torch.nn.functional.pad(weight, (0, -in_features % 32)).unflatten(1, (-1, 32)).abs().amax(2)
    bound = largest.repeat_interleave(32, 1)[:, :in_features] * (0.5 / 127 + 2**-11 + torch.finfo(dtype).eps / 2)
    assert ((found.double() - weight).abs() <= 1.001 * bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7])
def test_weights_that_no_scale_holds(value):
    with pytest.raises(ValueError, match=r"weights must be finite and below 8.32e\+06"):
        quantize_weight(torch.tensor([[1.0, value]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, dtype, device):
    """Each output is a sum of float32 products, rounded once; above 8 rows torch's, of the weight rounded to dtype."""
    rows, in_features, out_features = sizes
    weight, scales = weight_of(out_features, in_features, device, in_features**-0.5)
    x = torch.randn(rows, in_features).to(device, dtype)
    exact = dequantize_ref(weight, scales, torch.float64)
    eps = torch.finfo(dtype).eps
    for bias in (None, torch.randn(out_features, device=device), torch.randn(out_features).to(device, dtype)):
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        magnitudes = x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
        found = quantized_linear(x, weight, scales, bias)
        assert found.dtype == dtype
        rounding = 1e-6 * magnitudes + eps * expected.abs()
        if device == "cpu":  # which rounds x of up to 4 rows to within 2^-16 of its block's largest element
            rounding += 2**-16 * x.double().abs().amax(1, keepdim=True) * exact.abs().sum(1)
        assert ((found.double() - expected).abs() <= rounding + (2 * eps * magnitudes if rows > 8 else 0)).all()
        if rows <= 8:
            assert torch.equal(found, linear(x, weight, bias, scales))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("sizes", [(16, 1), (768, 40), (784, 100), (1536, 9), (2048, 33)], ids=str)
def test_after_a_norm(sizes, dtype, cuda_kernels):
    """The norm, rounded as that operator rounds it, and the layer."""
    in_features, out_features = sizes
    weight, scales = weight_of(out_features, in_features, cuda_kernels, in_features**-0.5)
    x = torch.randn(1, in_features).to(cuda_kernels, dtype)
    for residual_dtype, norm_dtype in ((torch.float32, dtype), (dtype, torch.float32), (None, dtype)):
        residual = None if residual_dtype is None else torch.randn(1, in_features).to(cuda_kernels, residual_dtype) * 3
        norm_weight = torch.rand(in_features).to(cuda_kernels, norm_dtype)
        for bias, sum_in_fp32 in ((None, True), (torch.randn(out_features, device=cuda_kernels), False)):
            out, total = normed_linear(x, residual, norm_weight, weight, scales, bias, 1e-5, sum_in_fp32)
            options = {"residual": residual, "eps": 1e-5, "prenorm": True, "residual_in_fp32": sum_in_fp32}
            normed, expected_total = rms_norm_fn(x, norm_weight, None, **options)
            assert torch.equal(total, expected_total) and total.dtype == expected_total.dtype and out.dtype == dtype
            exact = dequantize_ref(weight, scales, torch.float64)
            expected = normed.double() @ exact.T + (0 if bias is None else bias.double())
            magnitudes = normed.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
            # the sums of squares differ in their order, so an element of the norm may be rounded the other way
            error = (1e-6 + torch.finfo(dtype).eps / 4) * magnitudes + torch.finfo(dtype).eps * expected.abs()
            assert ((out.double() - expected).abs() <= error).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change,error,words",
    [
        ({"x": torch.randn(2, 32), "residual": torch.randn(2, 32)}, NotImplementedError, "a norm needs 1 row"),
        ({"x": torch.zeros(1, 33)[:, 1:]}, NotImplementedError, "must be 16-byte aligned with a norm"),
        ({"norm_weight": torch.ones(31)}, ValueError, r"norm_weight must have shape \(in,\)"),
        ({"residual": torch.randn(1, 32).half()}, TypeError, "residual must have the dtype of x, float32"),
        ({"scales": torch.ones(5, 1)}, TypeError, "scales must be float16, got float32"),
    ],
    ids=["rows", "address", "shape", "residual", "scales"],
)
def test_wrong_arguments_after_a_norm(change, error, words, cuda_kernels):
    weight, scales = weight_of(5, 32)
    arguments = {"x": torch.randn(1, 32), "residual": torch.randn(1, 32), "norm_weight": torch.ones(32)}
    arguments |= {"weight": weight, "scales": scales, "bias": None, **change}
    tensors = {name: None if value is None else value.to(cuda_kernels) for name, value in arguments.items()}
    if arguments["x"].storage_offset():  # which a copy to a device does not keep
        tensors["x"] = torch.zeros(1, 33, device=cuda_kernels)[:, 1:]
    with pytest.raises(error, match=words):
        normed_linear(**tensors, eps=1e-5)


@pytest.mark.gpu
def test_without_its_kernel(cuda_kernels):
    """One row goes to the kernel of several; a norm has no other."""
    weight, scales = weight_of(5, 32, cuda_kernels)
    x = torch.randn(1, 32, device=cuda_kernels)
    expected = linear(x, weight, None, scales)
    with without("linear/int8_one_row"):
        torch.testing.assert_close(linear(x, weight, None, scales), expected)
        with pytest.raises(NotImplementedError, match="a norm needs the kernel int8_one_row, which is off"):
            normed_linear(x, None, torch.ones(32, device=cuda_kernels), weight, scales, None, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck_after_a_norm(cuda_kernels):
    weight, scales = weight_of(5, 32, cuda_kernels)
    x, norm_weight = torch.randn(1, 32, device=cuda_kernels), torch.ones(32, device=cuda_kernels)
    for residual, bias in ((None, None), (x.clone(), norm_weight[:5].clone())):
        arguments = x, residual, norm_weight, weight, scales, bias, 1e-5, True
        torch.library.opcheck(torch.ops.mamba_ssm.normed_linear.default, arguments)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("in_features", [1, 45, 96, 4128])
def test_dequantized_rows(in_features, dtype, device):
    """A product of 8 and 11 bits is exact in float32, so that every number is rounded once: equal bits."""
    weight, scales = weight_of(7, in_features, device)
    weight[0, 0] = -128
    exact = dequantize_ref(weight, scales, torch.float64)
    assert torch.equal(dequantize(weight, scales, dtype), exact.to(dtype))
    moved = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(7, in_features)
    assert torch.equal(dequantize(moved, scales.t().contiguous().t(), dtype), exact.to(dtype))
    rows = torch.randint(7, (5, 4), device=device)
    for indices in (rows, rows.int(), rows.t(), rows[0, 0], rows[:0]):
        assert torch.equal(dequantize(weight, scales, dtype, indices), exact[indices.long()].to(dtype))


def test_indices_of_no_row(device, kernels):
    weight, scales = weight_of(7, 40, device)
    for index in (-1, 7, 2**40):
        indices = torch.tensor([1, index, 2], device=device)
        if kernels == "cpu":
            with pytest.raises(IndexError, match=rf"dequantize: indices must be in 0..6, got {index}"):
                dequantize(weight, scales, torch.float32, indices)
        else:
            out = dequantize(weight, scales, torch.float32, indices)
            assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    "change,error,words",
    [
        ({"indices": torch.ones(2)}, TypeError, "indices must be int32 or int64, got float32"),
        ({"indices": torch.ones(2, dtype=torch.int64, device="meta")}, ValueError, "indices must be on"),
        ({"weight": torch.ones(7, 40)}, TypeError, "weight must be int8, got float32"),
        ({"scales": torch.ones(7, 1).half()}, ValueError, r"scales must have shape \(out, ceil\(in / 32\)\)"),
    ],
    ids=["dtype", "device", "weight", "scales"],
)
def test_wrong_arguments_of_dequantize(change, error, words):
    weight, scales = weight_of(7, 40)
    with pytest.raises(error, match=words):
        dequantize(**{"weight": weight, "scales": scales, "dtype": torch.float32, **change})


@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck_and_compiled_dequantize(device):
    weight, scales = weight_of(7, 40, device)
    for indices in (None, torch.tensor([[1, 2, 6]], device=device)):
        torch.library.opcheck(torch.ops.mamba_ssm.dequantize.default, (weight, scales, indices, 2))
        compiled = torch.compile(dequantize, backend="aot_eager", fullgraph=True)
        expected = dequantize(weight, scales, torch.bfloat16, indices)
        assert torch.equal(compiled(weight, scales, torch.bfloat16, indices), expected)


def test_shapes_and_layouts(device):
    weight, scales = weight_of(20, 96, device)
    x = torch.randn(2, 3, 96, device=device)
    exact = dequantize_ref(weight, scales, torch.float32)
    expected = x @ exact.T
    rounding = (2**-15 * x.abs().amax() * exact.norm(dim=1).amax()).item()  # of x to 16 bits, 4 sigma
    for same in (x, x.repeat(1, 1, 2)[..., :96], x.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(quantized_linear(same, weight, scales), expected, rtol=1e-4, atol=1e-4 + rounding)
    for shape in ((96,), (0, 96), (2, 0, 96), (5, 4, 96)):
        assert quantized_linear(torch.ones(shape, device=device), weight, scales).shape == (*shape[:-1], 20)
    moved = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(20, 96)
    torch.testing.assert_close(quantized_linear(x, moved, scales), expected, rtol=1e-4, atol=1e-4 + rounding)


def test_a_nan_stays_in_its_row(device):
    weight, scales = weight_of(9, 300, device)
    x = torch.randn(4, 300, device=device)
    x[1, 299] = float("nan")
    out = quantized_linear(x, weight, scales)
    assert out[1].isnan().all() and not out[[0, 2, 3]].isnan().any()


@pytest.mark.parametrize("rows", [2, 30])
def test_gradients_are_those_of_the_dequantised_weight(rows, device):
    weight, scales = weight_of(10, 40, device)
    x = torch.randn(rows, 40, device=device, requires_grad=True)
    bias = torch.randn(10, device=device, requires_grad=True)
    slope = torch.randn(rows, 10, device=device)
    found = torch.autograd.grad(quantized_linear(x, weight, scales, bias), (x, bias), slope)
    plain = torch.nn.functional.linear(x, dequantize_ref(weight, scales, torch.float32), bias)
    for ours, theirs in zip(found, torch.autograd.grad(plain, (x, bias), slope), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out = quantized_linear(x, weight, scales, bias)
    assert out.dtype == torch.bfloat16
    (of_x,) = torch.autograd.grad(out.float().sum(), x)
    assert of_x.dtype == torch.float32
    with plain_torch():
        wide = x.detach().double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: quantized_linear(x, weight, scales), wide)


@pytest.mark.parametrize("rows", [2, 30])
def test_forward_mode_and_transforms(rows, device):
    weight, scales = weight_of(10, 40, device)
    x, bias = torch.randn(rows, 40, device=device), torch.randn(10, device=device)
    slope, matrix = torch.randn_like(x), dequantize_ref(weight, scales, torch.float32)
    expected = slope @ matrix.T

    def layer(x, bias=bias):
        return quantized_linear(x, weight, scales, bias)

    with forward_ad.dual_level():
        for given in (x, x.clone().requires_grad_()):
            out = layer(forward_ad.make_dual(given, slope))
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected)
    torch.testing.assert_close(torch.func.jvp(layer, (x, bias), (slope, bias))[1], expected + bias)
    torch.testing.assert_close(torch.func.grad(lambda x: layer(x).sum())(x), matrix.sum(0).expand(rows, 40))
    torch.testing.assert_close(torch.vmap(layer)(torch.stack([x, slope]))[1], expected + bias)
    projection = torch.nn.Linear(40, 10, device=device)
    with torch.no_grad(), forward_ad.dual_level():
        out = project(projection, forward_ad.make_dual(x, slope))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, slope @ projection.weight.T)


def test_compiled_and_traced(device):
    if TORCH < (2, 4):
        pytest.skip("torch before 2.4 compiles few autograd.Functions")
    weight, scales = weight_of(10, 40, device)
    run = torch.compile(quantized_linear, backend="aot_eager", fullgraph=True)
    for rows in (2, 30):
        x = torch.randn(rows, 40, device=device)
        torch.testing.assert_close(run(x, weight, scales), quantized_linear(x, weight, scales))
        given = x.clone().requires_grad_()
        run(given, weight, scales).sum().backward()
        expected = dequantize_ref(weight, scales, torch.float32).sum(0).expand(rows, 40)
        torch.testing.assert_close(given.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "x,error,words",
    [
        (torch.ones(2, 39), ValueError, r"x must be \(..., in\) with weight's in = 40, got \(2, 39\)"),
        (torch.ones(()), ValueError, r"x must be \(..., in\)"),
        (torch.ones(2, 40, dtype=torch.int64), TypeError, "x must be floating-point, got int64"),
        (torch.ones(2, 40, device="meta"), ValueError, "x must be on cpu like weight, got meta"),
        ([1.0], TypeError, "x must be a"),
    ],
    ids=["width", "scalar", "integers", "device", "list"],
)
def test_wrong_arguments(x, error, words):
    with pytest.raises(error, match=words):
        quantized_linear(x, *weight_of(10, 40))


def test_addresses_of_fake_tensors_are_not_read():
    """A fake tensor has none: torch warns, and later raises."""
    with FakeTensorMode(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x, norm_weight = torch.empty(1, 1, 64, device="cuda"), torch.empty(64, device="cuda")
        weight = torch.empty(128, 64, dtype=torch.int8, device="cuda")
        assert not takes_norm(x, None, norm_weight, weight)
