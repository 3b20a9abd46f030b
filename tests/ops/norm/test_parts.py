"""_layer_norm_fwd and _layer_norm_bwd of ops.triton.layer_norm, beside layer_norm_fn and its gradients."""

import pytest
import torch

from mamba_ssm.ops.triton.layer_norm import _layer_norm_bwd, _layer_norm_fwd, layer_norm_fn

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


def leaf(tensor):
    return None if tensor is None else tensor.clone().requires_grad_()


@pytest.mark.parametrize(("dtype", "residual_dtype"), DTYPES)
@pytest.mark.parametrize("second", [False, True], ids=["one_norm", "two_norms"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("is_rms_norm", [True, False], ids=["rms", "layer"])
def test_the_two_directions(is_rms_norm, has_residual, second, dtype, residual_dtype, device):
    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, device=device).to(dtype)

    x, dy, dy1 = normal(3, 7, 12, dtype=dtype).unbind()
    residual = normal(7, 12, dtype=residual_dtype) if has_residual else None
    weight, weight1 = normal(2, 12).unbind()
    bias, bias1 = (None, None) if is_rms_norm else normal(2, 12).unbind()
    if not second:
        weight1 = bias1 = None
    options = {"is_rms_norm": is_rms_norm}
    y, y1, mean, rstd, total, *dropout = _layer_norm_fwd(
        x, weight, bias, 1e-5, residual, None, weight1, bias1, residual_dtype=residual_dtype, **options
    )
    assert dropout == [None, None, None]
    assert rstd.shape == (7,) and (mean is None) == is_rms_norm
    assert total.dtype == residual_dtype

    leaves = [leaf(tensor) for tensor in (x, residual, weight, bias, weight1, bias1)]
    x_leaf, residual_leaf, weight_leaf, bias_leaf, *others = leaves
    expected = layer_norm_fn(
        x_leaf, weight_leaf, bias_leaf, residual_leaf, None, *others, 1e-5,
        prenorm=True, residual_in_fp32=residual_dtype != dtype, **options,
    )  # fmt: skip
    for found, right in zip([y, y1, total] if second else [y, total], expected, strict=True):
        torch.testing.assert_close(found, right.detach())

    dresidual = normal(7, 12, dtype=residual_dtype)
    given = [dy, dy1, dresidual] if second else [dy, dresidual]
    wanted = iter(torch.autograd.grad(expected, [tensor for tensor in leaves if tensor is not None], given))
    gradients = [None if tensor is None else next(wanted) for tensor in leaves]
    backward = (dy, total, weight, bias, 1e-5, mean, rstd, dresidual, dy1 if second else None, weight1, bias1)
    dx, dweight, dbias, dsum, dx1, *found1 = _layer_norm_bwd(
        *backward, has_residual=has_residual, x_dtype=dtype, **options
    )
    assert dx1 is None
    for found, right in zip((dx, dsum, dweight, dbias, *found1), gradients, strict=True):
        assert (found is None) == (right is None)
        if found is not None:
            # bfloat16: what flows to the sum (values up to 8) is added before it is rounded here, and after it there.
            tolerance = {"rtol": 2**-7, "atol": 2**-5} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(found, right, **tolerance)


def test_a_wider_output_is_not_rounded_before(device):
    x, weight, bias = torch.randn(5, 8, device=device).bfloat16(), torch.randn(2, 8, device=device), None
    found = _layer_norm_fwd(x, weight[0], bias, 1e-5, weight1=weight[1], out_dtype=torch.float32, is_rms_norm=True)
    exact = _layer_norm_fwd(x.float(), weight[0], bias, 1e-5, weight1=weight[1], is_rms_norm=True)
    for wide, right in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(wide, right)
    assert found[4] is x


def test_dy1_and_weight1_come_together(device):
    x, weight, rstd = torch.zeros(3, 8, device=device), torch.ones(8, device=device), torch.ones(3, device=device)
    with pytest.raises(ValueError, match="dy1 and weight1 must be given together"):
        _layer_norm_bwd(x, x, weight, None, 1e-5, None, rstd, dy1=x, is_rms_norm=True)


def test_the_output_again_and_dtypes(device):
    x, dy = torch.randn(2, 5, 8, device=device)
    weight = torch.ones(8, device=device)
    y, _, mean, rstd, total, *_ = _layer_norm_fwd(x, weight, None, 1e-5, out_dtype=torch.bfloat16)
    assert total is x and y.dtype == torch.bfloat16
    results = _layer_norm_bwd(
        dy.bfloat16(), x, weight, None, 1e-5, mean, rstd, x_dtype=torch.float16, recompute_output=True
    )
    assert len(results) == 8 and torch.equal(results[-1], y)
    assert results[0].dtype == torch.float16 and results[3] is None
    half = x.half()  # neither of dy's dtype nor float32
    _, _, mean, rstd, *_ = _layer_norm_fwd(half, weight, None, 1e-5)
    torch.testing.assert_close(
        _layer_norm_bwd(dy.bfloat16(), half, weight, None, 1e-5, mean, rstd)[0], results[0], rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("function", "change", "name"),
    [
        (_layer_norm_fwd, {"x1": torch.zeros(3, 8)}, "x1"),
        (_layer_norm_fwd, {"dropout_p": 0.1}, "dropout_p"),
        (_layer_norm_fwd, {"rowscale": torch.zeros(3)}, "rowscale"),
        (_layer_norm_bwd, {"seeds": torch.zeros(3)}, "seeds"),
        (_layer_norm_bwd, {"has_x1": True}, "has_x1"),
    ],
)
def test_what_only_layer_norm_fn_has(function, change, name):
    x, weight = torch.zeros(3, 8), torch.ones(8)
    arguments = (
        (x, x, weight, None, 1e-5, None, torch.ones(3)) if function is _layer_norm_bwd else (x, weight, None, 1e-5)
    )
    with pytest.raises(NotImplementedError, match=f"{name} cannot be given; call layer_norm_fn"):
        function(*arguments, **change)
