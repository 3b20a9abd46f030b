"""SwiGLU against its reference, softplus against torch's."""

from functools import partial

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id, outputs_and_gradients

from mamba_ssm.ops.norm import swiglu_ref
from mamba_ssm.ops.triton.k_activations import _swiglu_bwd, _swiglu_fwd, swiglu
from mamba_ssm.ops.triton.softplus import softplus


@pytest.mark.parametrize("gate_last", [False, True], ids=["gate first", "gate last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(2,), (3, 6), (2, 5, 128), (300, 14), (2, 2, 4098), (3, 16384), (0, 8), (2, 0)])
def test_swiglu(shape, dtype, gate_last, device):
    tensors = {"xy": 3 * torch.randn(*shape).to(device, dtype)}
    found = outputs_and_gradients(partial(swiglu, gate_last=gate_last), tensors)
    assert found["out0"].dtype == dtype
    reference = partial(swiglu_ref, gate_last=gate_last)
    plain = outputs_and_gradients(reference, tensors)
    assert_close_to_truth(found, plain, outputs_and_gradients(reference, tensors, torch.float64))


def test_swiglu_of_views(device):
    wide = torch.randn(3, 6, 50, device=device)
    for xy in (wide[..., 1:41], wide[..., 4:44], wide.transpose(0, 1)[..., :40], wide[..., :40].transpose(1, 2)):
        torch.testing.assert_close(swiglu(xy), swiglu_ref(xy))


def test_upstreams_pieces(device):
    xy, dout = torch.randn(4, 32, device=device), torch.randn(4, 16, device=device)
    out, buffer = torch.empty(2, 4, 16, device=device)
    assert _swiglu_fwd(xy, out) is out
    torch.testing.assert_close(out, swiglu_ref(xy))
    leaf = xy.clone().requires_grad_()
    (expected,) = torch.autograd.grad(swiglu_ref(leaf), leaf, dout)
    torch.testing.assert_close(_swiglu_bwd(xy, dout), expected)
    dxy = torch.empty_like(xy)
    results = _swiglu_bwd(xy, dout, dxy, recompute_output=True, out=buffer)
    assert results[0] is dxy
    assert results[1] is buffer
    torch.testing.assert_close(results, (expected, out))
    with pytest.raises(ValueError, match=r"dxy must have shape \(4, 32\), got \(32, 4\)"):
        _swiglu_bwd(xy, dout, dxy.t())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="the last dimension of xy must be even, x and y side by side, got 7"):
        swiglu(torch.zeros(3, 7))
    with pytest.raises(TypeError, match="xy must be float32, float16 or bfloat16, got float64"):
        swiglu(torch.zeros(3, 8).double())
    with pytest.raises(ValueError, match=r"dout must have shape \(\.\.\., N\) = \(3, 4\), got \(3, 8\)"):
        _swiglu_bwd(torch.zeros(3, 8), torch.zeros(3, 8))


def test_softplus(device):
    x = torch.linspace(-50, 50, 101, device=device)
    torch.testing.assert_close(softplus(x), torch.nn.functional.softplus(x))
