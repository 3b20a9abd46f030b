"""Add + LayerNorm/RMSNorm against the reference: values, gradients, memory layouts, wrong arguments."""

from functools import partial

import pytest
import torch
from _helpers.cases import DTYPES, NORM_WIDTHS, assert_close_to_truth, dtype_id, norm_rows, outputs_and_gradients

from mamba_ssm.ops.norm.backward import add_norm_backward_op
from mamba_ssm.ops.norm.forward import add_norm_op
from mamba_ssm.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

# One element; less than a vector; odd; several rows a block (700: many blocks); one row a block. CUDA reads rows of
# more than 16384 elements (4096 where no vector of four fits; backward: half of that) several times; 65540 is too long
# for shared memory.
SHAPES = [(1, 1), (3, 5), (2, 3, 7), (2, 12), (700, 40), (4, 3, 250), (33, 1536), (2, 2, 4099), (3, 8192)]
SHAPES += [(2, 16384), (2, 16388), (2, 65540), (0, 16), (2, 0)]
OPTIONS = [
    {},
    {"is_rms_norm": True},
    {"is_rms_norm": True, "bias": False},
    {"residual": "same"},
    {"residual": "same", "prenorm": True, "is_rms_norm": True, "bias": False},
    {"residual": "float32", "prenorm": True, "is_rms_norm": True, "bias": False},
    {"residual": "float32", "prenorm": True},
    {"residual_in_fp32": True, "prenorm": True},
]


def inputs(shape, options, dtype, device, weight_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    residual_dtype = {"same": dtype, "float32": torch.float32, "float16": torch.float16}.get(options.get("residual"))
    return {
        "x": normal(*shape) + 1,
        "weight": normal(shape[-1], dtype=weight_dtype),
        "bias": normal(shape[-1], dtype=weight_dtype) if options.get("bias", True) else None,
        "residual": normal(*shape, dtype=residual_dtype) if residual_dtype else None,
    }


def functions(options):
    """The operator and its reference with these options."""
    flags = {name: options.get(name, False) for name in ("prenorm", "is_rms_norm")}
    reference = partial(layer_norm_ref, eps=1e-5, **flags)
    return partial(layer_norm_fn, eps=1e-5, residual_in_fp32=options.get("residual_in_fp32", False), **flags), reference


def check(function, reference, tensors):
    found = outputs_and_gradients(function, tensors)
    plain = outputs_and_gradients(reference, tensors)
    for name, value in tensors.items():
        if value is not None:
            assert found["d" + name].dtype == value.dtype
    truth = outputs_and_gradients(reference, tensors, torch.float64)
    cancelled = {}
    if tensors["x"].shape[-1] == 1:  # dx is the difference of two terms dout weight / rms that are equal but for eps
        cancelled["dx"] = (truth["dweight"] * tensors["weight"] / tensors["x"]).abs().max().item()
    assert_close_to_truth(found, plain, truth, cancelled=cancelled)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    for options in ({"residual": "float32", "prenorm": True}, {"is_rms_norm": True, "bias": False}):
        found = check(*functions(options), inputs(shape, options, dtype, device))
        assert found["out0"].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_many_rows(width, dtype, device):
    shape = (norm_rows(width, device), width)
    for options in ({"residual": "float32", "prenorm": True}, {"is_rms_norm": True, "bias": False}):
        check(*functions(options), inputs(shape, options, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, dtype, device):
    tensors = inputs((3, 11, 64), options, dtype, device)
    found = check(*functions(options), tensors)
    if options.get("prenorm"):
        wide = options.get("residual_in_fp32") or options.get("residual") == "float32"
        assert found["out1"].dtype == (torch.float32 if wide else dtype)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=dtype_id)
def test_weight_and_residual_of_other_dtypes(weight_dtype, device):
    options = {"residual": "float16", "prenorm": True}
    found = check(*functions(options), inputs((5, 96), options, torch.bfloat16, device, weight_dtype))
    assert (found["out0"].dtype, found["out1"].dtype) == (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_a_large_mean(is_rms_norm, device):
    """The variance comes from distances, not from a difference of large sums."""
    x = torch.randn(4, 640, device=device) + 1000
    tensors = {"x": x, "weight": torch.randn(640, device=device), "bias": torch.randn(640, device=device)}
    check(*functions({"is_rms_norm": is_rms_norm}), tensors)


def test_views(device):
    """Rows with a stride of their own are read in place, others are copied; expanded gradients too."""
    wide = torch.randn(3, 5, 80, device=device)
    weight, bias = torch.randn(2, 32, device=device)
    views = [wide[..., 8:40], wide[..., 9:41], wide[:, ::2, :32], wide[:, :, ::2][..., :32], wide[1, 2, :32]]
    views += [wide[:1, :, 3:35], wide.transpose(0, 1)[..., 4:36], wide[0, 0, :32].expand(3, 5, 32)]
    for x in views:
        found = layer_norm_fn(x, weight, bias, residual=x, eps=1e-5)
        torch.testing.assert_close(found, layer_norm_fn(x.contiguous(), weight, bias, x.contiguous(), eps=1e-5))
        leaf = x.detach().requires_grad_()
        same = x.detach().clone().requires_grad_()
        for tensor in (leaf, same):
            layer_norm_fn(tensor, weight, None, eps=1e-5, is_rms_norm=True).sum().backward()
        torch.testing.assert_close(leaf.grad, same.grad)


def test_elements_that_are_not_aligned(device):
    """Every offset of the first element: vectors of eight, of four, and single elements."""
    for dtype in (torch.bfloat16, torch.float32):
        base = torch.randn(6 * 64 + 16, device=device).to(dtype)
        weight = torch.randn(64 + 16, device=device)
        for offset in (0, 1, 2, 4, 8):
            x, w = base[offset : offset + 384].view(6, 64), weight[offset : offset + 64]
            tensors = {"x": x, "weight": w, "bias": None, "residual": x}
            leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}
            found = outputs_of(leaves)
            copies = {name: None if t is None else t.detach().clone().requires_grad_() for name, t in tensors.items()}
            for one, other in zip(found, outputs_of(copies), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def outputs_of(leaves):
    out = layer_norm_fn(**leaves)
    return [out, *torch.autograd.grad(out.square().sum(), [leaf for leaf in leaves.values() if leaf is not None])]


def test_prenorm_without_a_residual_returns_x(device):
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    out, total = rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True)
    assert total is x
    torch.testing.assert_close(out, rms_norm_ref(x, weight, None))


def test_only_the_sum_is_used(device):
    x, residual = (torch.randn(3, 8, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, device=device, requires_grad=True)
    _, total = rms_norm_fn(x, weight, None, residual, prenorm=True)
    total.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x + residual).detach())
    torch.testing.assert_close(residual.grad, x.grad)


def test_only_the_sum_in_float32_is_used(device):
    x = torch.randn(3, 8, device=device).bfloat16().requires_grad_()
    _, total = rms_norm_fn(x, torch.ones(8, device=device), None, prenorm=True, residual_in_fp32=True)
    assert total.dtype == torch.float32
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_second_norm_second_input_and_rowscale(device):
    names = ("x", "weight", "bias", "residual", "x1", "weight1", "bias1")
    shapes = [(2, 3, 40), (40,), (40,), (2, 3, 40), (2, 3, 40), (40,), (40,)]
    tensors = {name: torch.randn(*shape, device=device) for name, shape in zip(names, shapes, strict=True)}
    check(partial(layer_norm_fn, prenorm=True), partial(layer_norm_ref, prenorm=True), tensors)
    del tensors["x1"], tensors["residual"]
    tensors["rowscale"] = torch.rand(2, 3, device=device)
    check(rms_norm_fn, rms_norm_ref, tensors)


def test_dropout(device):
    x, x1, residual = torch.randn(3, 50, 40, device=device)
    weight = torch.randn(40, device=device)
    arguments = {"x": x, "weight": weight, "bias": None, "residual": residual, "x1": x1, "dropout_p": 0.4}
    out, total, mask, mask1 = layer_norm_fn(**arguments, prenorm=True, return_dropout_mask=True)
    for kept in (mask, mask1):
        assert kept.dtype == torch.bool
        assert 0.5 < kept.float().mean() < 0.7
    assert not torch.equal(mask, mask1)
    masks = {"dropout_mask": mask, "dropout_mask1": mask1}
    torch.testing.assert_close((out, total), layer_norm_ref(**arguments, **masks, prenorm=True))
    results = layer_norm_fn(x, weight, None, return_dropout_mask=True)
    assert results[1:] == (None, None)


def test_module(device):
    norm = RMSNorm(48, eps=1e-3, dropout_p=0.5, device=device, dtype=torch.bfloat16)
    assert set(norm.state_dict()) == {"weight"}
    x, residual = torch.randn(5, 48, device=device).bfloat16(), torch.randn(5, 48, device=device)
    out, total = norm.eval()(x, residual, prenorm=True)
    expected = rms_norm_ref(x, norm.weight, None, residual, eps=1e-3, prenorm=True)
    torch.testing.assert_close((out, total), expected)
    assert not torch.equal(norm.train()(x, residual), out)


@pytest.mark.parametrize("autocast", [False, True])
def test_linear(autocast, device):
    x, residual, weight, bias = torch.randn(4, 6, 40, device=device)
    linear = torch.nn.Linear(40, 24, device=device)
    parameters = weight[0], bias[0], linear.weight, linear.bias
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        out, total = layer_norm_linear_fn(x, *parameters, residual, prenorm=True)
        expected = linear(layer_norm_ref(x, weight[0], bias[0], residual))
    assert out.dtype == expected.dtype == (torch.bfloat16 if autocast else torch.float32)
    # The norms differ in their last bits, which may round to the neighbouring bfloat16 before 40 products are added up.
    tolerance = 2e-2 if autocast else 1e-4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(total, x + residual)


def test_nan_and_infinity_stay_in_their_row(device):
    x = torch.randn(6, 40, device=device)
    weight = torch.randn(40, device=device)
    clean = layer_norm_fn(x, weight, None)
    x[1, 3], x[4, 39] = float("nan"), float("inf")
    out = layer_norm_fn(x, weight, None)
    assert out[[1, 4]].isnan().all()
    torch.testing.assert_close(out[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(layer_norm_fn(leaf, weight, None).sum(), leaf)
    assert grad[[0, 2, 3, 5]].isfinite().all()


def test_backward_gives_the_same_bits(device):
    tensors = inputs((900, 256), {"residual": "same"}, torch.bfloat16, device)
    runs = [outputs_and_gradients(layer_norm_fn, tensors) for _ in range(3)]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, other[name]), name


ERRORS = [
    ({"x": lambda t: t.double()}, TypeError, "x must be float32, float16 or bfloat16, got float64"),
    ({"x": lambda t: t[0, 0]}, ValueError, r"x must have at least 1 dimension \(\.\.\., N\), got a scalar"),
    ({"weight": lambda t: t[:-1]}, ValueError, r"weight must have shape \(N,\) = \(8,\), got \(7,\)"),
    ({"weight": lambda t: t.double()}, TypeError, "weight must be float32, float16 or bfloat16, got float64"),
    ({"bias": lambda t: t[None]}, ValueError, r"bias must have shape \(N,\) = \(8,\), got \(1, 8\)"),
    ({"residual": lambda t: t[:-1]}, ValueError, r"residual must have shape \(\.\.\., N\) = \(3, 8\), got \(2, 8\)"),
    ({"residual": lambda t: t.int()}, TypeError, "residual must have the dtype of x, float32, got int32"),
    ({"weight": lambda t: t.to("meta")}, ValueError, "weight must be on cpu like x, got meta"),
]


@pytest.mark.parametrize("spoil,error,message", ERRORS, ids=[row[2][:40] for row in ERRORS])
def test_wrong_tensors(spoil, error, message):
    tensors = inputs((3, 8), {"residual": "same"}, torch.float32, "cpu")
    layer_norm_fn(**tensors)
    for name, change in spoil.items():
        tensors[name] = change(tensors[name])
    with pytest.raises(error, match=message):
        layer_norm_fn(**tensors)
    ordered = (tensors[name] for name in ("x", "residual", "weight", "bias"))
    with pytest.raises(error, match=message):
        add_norm_op(*ordered, 1e-5, True, False, False, True)


def test_wrong_dtypes_beside_x():
    x, weight = torch.randn(3, 8), torch.randn(8)
    for name, value in (("x1", x.to(torch.complex64)), ("rowscale", torch.ones(3).int()), ("x", x.int())):
        with pytest.raises(TypeError, match=f"{name} must be float32, float16 or bfloat16"):
            layer_norm_fn(**{"x": x, "weight": weight, "bias": None, "dropout_p": 0.1, name: value})


def test_wrong_options():
    x, weight = torch.randn(3, 8), torch.randn(8)
    for options, message in [
        ({"rowscale": torch.ones(3), "x1": x}, "rowscale and x1 cannot be given together"),
        ({"rowscale": torch.ones(4)}, r"rowscale must have shape \(\.\.\.\) of x \(\.\.\., N\) = \(3,\), got \(4,\)"),
        ({"x1": x[:1]}, r"x1 must have shape \(\.\.\., N\) = \(3, 8\), got \(1, 8\)"),
        ({"x1": x, "residual": x[:1]}, r"residual must have shape \(\.\.\., N\) = \(3, 8\), got \(1, 8\)"),
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
        ({"dropout_p": -0.1}, "dropout_p must be at least 0 and less than 1, got -0.1"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer_norm_fn(x, weight, None, **options)


def test_wrong_tensors_in_the_backward_operator(device):
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    _, _, mean, rstd = add_norm_op(x, None, weight, None, 1e-5, False, False, False, True)
    add_norm_backward_op(x, None, x, weight, None, mean, rstd, False)
    for spoiled, message in [
        ((x, None, x[:2], weight, None, mean, rstd, False), "sum must have shape"),
        ((x, x[:2], x, weight, None, mean, rstd, False), "dsum must have shape"),
        ((x, None, x, weight, None, mean, rstd[:2], False), "rstd must have shape"),
        ((x, None, x, weight, None, None, rstd, False), "mean must be given unless is_rms_norm"),
    ]:
        with pytest.raises(ValueError, match=message):
            add_norm_backward_op(*spoiled)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(cuda):
    rows, width = (1 << 19) + 3, 4096
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    x = torch.randn(rows, width, device=cuda, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(width, device=cuda)
    out = rms_norm_fn(x, weight, None)
    last = x[-2:].detach().clone().requires_grad_()
    expected = rms_norm_ref(last, weight, None)
    torch.testing.assert_close(out[-2:], expected)
    dout = torch.zeros_like(out)
    dout[-2:] = 1
    torch.testing.assert_close(
        torch.autograd.grad(out, x, dout)[0][-2:], torch.autograd.grad(expected.sum(), last)[0], rtol=2e-2, atol=1e-2
    )
