"""Scans of images in four directions against plain torch in float64, which flips and transposes copies."""

import pytest
import torch

from mamba_ssm.ops.cross_selective_scan import cross_selective_scan, cross_selective_scan_ref
from mamba_ssm.utils.reference import plain_torch

NAMES = "x", "x_proj_weight", "dt_proj_weight", "A", "D", "dt_bias"
SHAPES = {  # batch, dim, height, width, dstate, rank
    "odd": (2, 6, 5, 7, 4, 2),
    "one_row": (1, 3, 1, 9, 2, 1),
    "one_column": (2, 3, 8, 1, 16, 3),
    "one_pixel": (1, 2, 1, 1, 1, 1),
    "beyond_a_tile": (1, 9, 13, 17, 5, 4),
    "empty_batch": (0, 3, 4, 5, 2, 2),
    "no_rows": (1, 3, 0, 5, 2, 2),
}
# Of the largest value. In 16 bits x_proj's and dt_proj's products are rounded, which float64 does not do.
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def tensors(shape, dtype=torch.float32, device="cpu", requires_grad=False):
    """The arguments, in their order; parameters in at least float32."""
    batch, dim, height, width, dstate, rank = SHAPES[shape]
    wide = torch.promote_types(dtype, torch.float32)
    given = (
        torch.randn(batch, dim, height, width).to(dtype),
        (torch.randn(4, rank + 2 * dstate, dim) * dim**-0.5).to(dtype),
        (torch.randn(4, dim, rank) * rank**-0.5).to(dtype),
        -torch.rand(4, dim, dstate, dtype=wide),
        torch.randn(4, dim, dtype=wide),
        torch.randn(4, dim, dtype=wide),
    )
    return [tensor.to(device).requires_grad_(requires_grad) for tensor in given]


def float64(given):
    return [tensor.detach().cpu().double().requires_grad_() for tensor in given]


def assert_near(found, true, dtype, what="out"):
    assert found.shape == true.shape, what
    if true.numel():
        error, largest = (found.cpu() - true).abs().max().item(), true.abs().max().item()
        assert error <= CLOSE[dtype] * max(1, largest), f"{what}: {error} of {largest}"


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients(shape, dtype, device):
    given = tensors(shape, dtype, device, requires_grad=True)
    exact = float64(given)
    out, true = cross_selective_scan(*given), cross_selective_scan_ref(*exact)
    assert out.dtype == dtype
    assert_near(out, true, dtype)
    dout = torch.randn(true.shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, given, dout.to(out))
    true_grads = torch.autograd.grad(true, exact, dout, materialize_grads=True)
    for name, tensor, grad, true_grad in zip(NAMES, given, grads, true_grads, strict=True):
        assert grad.dtype == tensor.dtype
        assert_near(grad, true_grad, dtype, name)


@pytest.mark.parametrize("shape", ["odd", "one_row", "one_column"])
@pytest.mark.parametrize("layout", ["channels_last", "half_of_the_channels", "every_second_column", "expanded"])
def test_strided_images(layout, shape, device):
    x, *rest = tensors(shape, device=device)
    if layout == "channels_last":
        strided = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    elif layout == "half_of_the_channels":
        strided = torch.cat([x, x], dim=1).chunk(2, dim=1)[1]
    elif layout == "every_second_column":
        strided = x.repeat_interleave(2, dim=3)[..., ::2]
    else:
        x = strided = x[..., :1, :1].expand_as(x)
    leaves = strided.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
    found, same = (cross_selective_scan(leaf, *rest) for leaf in leaves)
    torch.testing.assert_close(found, same)
    dout = torch.randn_like(same).transpose(2, 3).contiguous().transpose(2, 3)  # strided, too
    torch.testing.assert_close(
        *(torch.autograd.grad(out, leaf, dout)[0] for out, leaf in zip((found, same), leaves, strict=True))
    )


@pytest.mark.parametrize("softplus", [False, True])
def test_absent_parameters(softplus, device):
    given = tensors("odd", device=device)[:4]
    given[2] = given[2] * 0.1  # without softplus a large negative dt makes states grow
    true = cross_selective_scan_ref(*float64(given), delta_softplus=softplus)
    assert_near(cross_selective_scan(*given, delta_softplus=softplus), true, torch.float32)


def test_directions(device):
    """Two lit pixels, five steps apart by rows, one by columns: in each direction one sees the other, halved by each.

    dt is 1, from its bias; B and C are x, so that nothing enters or is read but there.
    """
    x = torch.zeros(1, 1, 3, 3, device=device)
    x[0, 0, 0, 1], x[0, 0, 2, 0] = 1, 2
    A = torch.full((4, 1, 1), 0.5, device=device).log()
    dt_proj, bias = torch.zeros_like(A), torch.ones(4, 1, device=device)
    expected = [(1, 8 + 2 * 0.5**5), (1 + 4 * 0.5, 8), (1 + 4 * 0.5**5, 8), (1, 8 + 2 * 0.5)]
    for direction, (upper, lower) in enumerate(expected):
        x_proj = torch.zeros(4, 3, 1, device=device)
        x_proj[direction, 1:] = 1
        out = cross_selective_scan(x, x_proj, dt_proj, A, dt_bias=bias, delta_softplus=False)
        true = torch.zeros_like(x)
        true[0, 0, 0, 1], true[0, 0, 2, 0] = upper, lower
        torch.testing.assert_close(out, true)


def test_makes_one_transposed_copy(device):
    """Kept for backward are the image, its transpose, and per direction dt: not four images."""
    batch, dim, height, width, _, _ = SHAPES["odd"]
    given, storages = tensors("odd", device=device, requires_grad=True), {}

    def pack(tensor):
        if tensor.numel() == batch * dim * height * width:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_selective_scan(*given)
    assert len(storages) == 2 + 4


def test_plain_torch():
    given = tensors("odd", torch.float64)
    with plain_torch():
        torch.testing.assert_close(cross_selective_scan(*given), cross_selective_scan_ref(*given))


def test_autocast(device):
    given = tensors("odd", device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = cross_selective_scan(*given)
    assert out.dtype == torch.bfloat16
    exact = float64(given)
    true = cross_selective_scan_ref(*exact)
    assert_near(out, true, torch.bfloat16)
    out.float().sum().backward()
    true.sum().backward()
    for name, found, expected in zip(NAMES, given, exact, strict=True):
        assert found.grad.dtype == torch.float32
        assert_near(found.grad, expected.grad, torch.bfloat16, name)


def test_compile(device):
    given = tensors("odd", device=device, requires_grad=True)
    compiled = torch.compile(cross_selective_scan, fullgraph=True, backend="aot_eager")
    outs = compiled(*given), cross_selective_scan(*given)
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), given) for out in outs))


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"x": torch.ones(2, 6, 35)}, ValueError, r"x must have 4 dimensions \(B, D, H, W\), got shape \(2, 6, 35\)"),
        ({"x": torch.ones(2, 6, 5, 7).double()}, TypeError, "x must be float32, float16 or bfloat16, got float64"),
        ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
        (
            {"x_proj_weight": torch.ones(4, 10, 5)},
            ValueError,
            r"x_proj_weight must have shape \(4, R \+ 2N, D\) = \(4, 10, 6\), got \(4, 10, 5\)",
        ),
        (
            {"x_proj_weight": torch.ones(4, 10, 6).half()},
            TypeError,
            "x_proj_weight must have the dtype of x, float32, got float16",
        ),
        ({"dt_proj_weight": torch.ones(24, 2)}, ValueError, "dt_proj_weight must have 3 dimensions"),
        ({"A": torch.ones(3, 6, 4)}, ValueError, r"A must have shape \(4, D, N\) = \(4, 6, 4\), got \(3, 6, 4\)"),
        (
            {"A": torch.ones(4, 6, 4, dtype=torch.complex64)},
            TypeError,
            "A must be .* got complex64 .complex states are not supported",
        ),
        ({"A": torch.ones(4, 6, 257)}, ValueError, "dstate .* must lie in 1..256, got 257"),
        ({"D": torch.ones(24)}, ValueError, r"D must have shape \(4, D\) = \(4, 6\), got \(24,\)"),
        ({"dt_bias": [0.0] * 4}, TypeError, "dt_bias must be a torch.Tensor, got list"),
        ({"dt_bias": torch.ones(4, 6, device="meta")}, ValueError, "dt_bias must be on cpu like x, got meta"),
    ],
)
def test_bad_arguments_are_named(changes, error, words):
    given = {**dict(zip(NAMES, tensors("odd"), strict=True)), **changes}
    with pytest.raises(error, match=f"cross_selective_scan: {words}"):
        cross_selective_scan(**given)
