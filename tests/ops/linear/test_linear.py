"""linear against float64, and when project() calls a module instead."""

import pytest
import torch
import torch.nn as nn
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id

from mamba_ssm.ops.linear import dequantize_ref, linear, linear_ref, project

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# rows, in, out
SIZES = [
    (1, 768, 100),
    (1, 1, 1),
    (2, 1536, 37),
    (3, 70, 65),
    (4, 2049, 9),
    (5, 800, 16),
    (7, 31, 1),
    (8, 264, 130),
    (19, 40, 33),
]


def run(x, weight, bias, dtype=torch.float32):
    out = x.to(dtype) @ weight.to(dtype).T
    return {"out": (out if bias is None else out + bias.to(dtype)).to(x.dtype if dtype == torch.float32 else dtype)}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, dtype, device):
    rows, features, outputs = sizes
    x, weight = (torch.randn(count, features).to(device, dtype) for count in (rows, outputs))
    for bias in (None, torch.randn(outputs, device=device), torch.randn(outputs).to(device, dtype)):
        found = {"out": linear(x, weight, bias)}
        assert found["out"].dtype == dtype
        assert_close_to_truth(found, run(x, weight, bias), run(x, weight, bias, torch.float64))


def quantized(outputs, features, device):
    """A weight of int8 that uses the whole range, and its scales."""
    weight = torch.randint(-127, 128, (outputs, features), dtype=torch.int8)
    scales = torch.rand(outputs, -(-features // 32)).half() / 64
    return weight.to(device), scales.to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("sizes", [*SIZES, (1, 31, 3), (2, 33, 1), (7, 48, 5), (9, 64, 20)], ids=str)
def test_int8(sizes, dtype):
    """Of up to 4 rows, x is rounded to within 2^-16 of its block's largest element: in float32 that is the error."""
    rows, features, outputs = sizes
    x = torch.randn(rows, features).to(dtype)
    weight, scales = quantized(outputs, features, "cpu")
    exact = dequantize_ref(weight, scales, torch.float32)
    for bias in (None, torch.randn(outputs)):
        found = linear(x, weight, bias, scales)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        truth = linear_ref(x.double(), exact.double(), None if bias is None else bias.double())
        rounding = 2**-15 * x.double().abs().amax() * exact.double().pow(2).sum(1).sqrt()  # 4 sigma
        error = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype] * truth.abs() + rounding
        assert ((found.double() - truth).abs() <= error + 1e-6).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-30, 1e-42, 3e38])
@pytest.mark.parametrize("rows", [2, 7])
def test_int8_of_extreme_values(rows, value):
    """What has no integers of 16 bits is multiplied as floats, as plain torch does; denormals are zero."""
    x = torch.randn(rows, 70)
    x[1] = 0
    x[1, 40] = value
    weight, scales = quantized(9, 70, "cpu")
    weight[:, 40] = weight[:, 40].abs().clamp_min(1)
    found, expected = linear(x, weight, None, scales), linear_ref(x, weight, None, scales)
    rounding = 1e-3 if value == 3e38 else 1e-4  # that one has integers: 2^-15 of a block's largest, as above
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=rounding)
    if value == 1e-30:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0.0)


def test_strides_and_addresses(device):
    x, weight = torch.randn(3, 96, device=device), torch.randn(20, 96, device=device)
    expected = linear(x, weight)
    for rows in (x.repeat(1, 2)[:, :96], x.T.contiguous().T, torch.cat([x.new_zeros(1), x.flatten()])[1:].view(3, 96)):
        torch.testing.assert_close(linear(rows, weight), expected)
    moved = torch.cat([x.new_zeros(1), weight.flatten()])[1:].view(20, 96)
    for same in (moved, weight.T.contiguous().T):
        torch.testing.assert_close(linear(x, same), expected)


def test_nothing_to_do(device):
    weight = torch.randn(5, 4, device=device)
    assert linear(torch.randn(0, 4, device=device), weight).shape == (0, 5)
    assert linear(torch.randn(2, 4, device=device), weight[:0]).shape == (2, 0)
    bias = torch.randn(5, device=device)
    assert torch.equal(linear(torch.randn(2, 0, device=device), weight[:, :0], bias), bias.expand(2, 5))


@pytest.mark.gpu
def test_more_rows_than_one_dimension_of_a_grid(cuda):
    """65535 blocks of 4 rows are 262,140."""
    x, weight = torch.randn(262_161, 8, device=cuda), torch.randn(3, 8, device=cuda)
    torch.testing.assert_close(linear(x, weight), (x.double() @ weight.double().T).float())


def test_a_nan_stays_in_its_row(device):
    x = torch.randn(4, 300, device=device)
    x[1, 7] = float("nan")
    out = linear(x, torch.randn(9, 300, device=device))
    assert out[1].isnan().all()
    assert not out[[0, 2, 3]].isnan().any()


@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
def test_opcheck(device):
    tensors = torch.randn(2, 12, device=device), torch.randn(5, 12, device=device)
    for bias in (None, torch.randn(5, device=device)):
        torch.library.opcheck(torch.ops.mamba_ssm.linear.default, (*tensors, bias))
    if device == "cpu":
        weight, scales = quantized(5, 12, device)
        torch.library.opcheck(torch.ops.mamba_ssm.linear.default, (tensors[0], weight, None, scales))


def test_project_is_the_module(device):
    module = nn.Linear(24, 10).to(device, torch.bfloat16)
    for shape in ((24,), (3, 24), (2, 1, 24), (2, 9, 24), (0, 24)):
        x = torch.randn(shape).to(device, torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(project(module, x), module(x), rtol=2e-2, atol=2e-2)
        assert project(module, x).requires_grad  # and else the gradient is torch's
    with torch.no_grad(), torch.autocast(device, torch.float16):
        assert project(module, x).dtype == module(x).dtype
    module.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    with torch.no_grad():
        assert not project(module, torch.ones(1, 24).to(device, torch.bfloat16)).any()


def test_project_of_float64_and_of_an_open_number_of_rows():
    """The module itself: the kernels take no float64, and a question about the rows would fix their number."""
    module = nn.Linear(24, 10)
    with torch.no_grad():
        x = torch.randn(2, 24, dtype=torch.float64)
        assert project(module.double(), x).dtype == torch.float64
        if TORCH < (2, 5):
            return

        class Projected(nn.Module):
            def forward(self, x):
                return project(module, x)

        module.bfloat16()
        rows = torch.export.Dim("rows", min=2, max=512)
        example = (torch.randn(3, 24, dtype=torch.bfloat16),)
        exported = torch.export.export(Projected(), example, dynamic_shapes=[{0: rows}], strict=False).module()
        assert exported(torch.randn(100, 24, dtype=torch.bfloat16)).shape == (100, 10)


@pytest.mark.parametrize(
    "change,error,words",
    [
        ({"x": torch.randn(12)}, ValueError, r"x must have 2 dimensions \(R, in\)"),
        ({"weight": torch.randn(5, 11)}, ValueError, r"weight must have shape \(out, in\)"),
        ({"weight": torch.randn(5, 12).half()}, TypeError, "weight must have the dtype of x, float32"),
        ({"bias": torch.randn(4)}, ValueError, r"bias must have shape \(out,\)"),
        ({"weight": torch.zeros(5, 12, dtype=torch.int8)}, TypeError, "an int8 weight needs scales, float16"),
        ({"scales": torch.ones(5, 1).half()}, TypeError, "weight must be int8, got float32"),
        (
            {"weight": torch.zeros(5, 12, dtype=torch.int8), "scales": torch.ones(5, 1)},
            TypeError,
            "scales must be float16, got float32",
        ),
        (
            {"weight": torch.zeros(5, 12, dtype=torch.int8), "scales": torch.ones(5, 2).half()},
            ValueError,
            r"scales must have shape \(out, ceil\(in / 32\)\) = \(5, 1\), got \(5, 2\)",
        ),
    ],
)
def test_wrong_arguments(change, error, words, device):
    arguments = {"x": torch.randn(2, 12), "weight": torch.randn(5, 12), "bias": None, "scales": None, **change}
    arguments = {name: None if value is None else value.to(device) for name, value in arguments.items()}
    with pytest.raises(error, match=f"linear: {words}"):
        linear(**arguments)
