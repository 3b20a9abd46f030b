"""Streaming scan: chunks chained through the state equal one call; any dstate; every dtype."""

import pytest
import torch
from _helpers.cases import DTYPES, dtype_id

from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
from mamba_ssm.ops.streaming import SelectiveScan


def inputs(batch, seqlen, dim, dstate, dtype, device):
    def normal(*shape):
        return torch.randn(*shape).to(device, dtype)

    delta = (0.05 * torch.rand(batch, seqlen, dim)).to(device, dtype)
    A = (-0.5 - torch.rand(dim, dstate)).to(device)
    D = torch.randn(dim).to(device)
    return normal(batch, seqlen, dim), delta, A, normal(batch, seqlen, dstate), normal(batch, seqlen, dstate), D


def chunked(scan, tensors, length, state=None):
    u, delta, A, B, C, D = tensors
    parts = []
    for start in range(0, u.shape[1], length):
        part = slice(start, start + length)
        y, state = scan.forward_with_state(u[:, part], delta[:, part], A, B[:, part], C[:, part], D, state)
        parts.append(y)
    return torch.cat(parts, dim=1), state


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dstate", [1, 16, 300])
def test_against_reference(dstate, dtype, device):
    u, delta, A, B, C, D = tensors = inputs(2, 40, 6, dstate, dtype, device)
    y, state = SelectiveScan().forward_with_state(*tensors)
    assert y.dtype == dtype and y.shape == u.shape
    assert state.dtype == dtype and state.shape == (2, 6, dstate)
    expected, expected_state = selective_scan_ref(
        *(t.transpose(1, 2) if t.dim() == 3 else t for t in (u, delta, A, B, C)), D, return_last_state=True
    )
    eps = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(y, expected.transpose(1, 2), rtol=2 * eps, atol=4 * eps * expected.abs().max().item())
    torch.testing.assert_close(state.float(), expected_state, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(SelectiveScan()(*tensors), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("length", [1, 7, 64])
def test_chunks_equal_one_call(length, dtype, device):
    tensors = inputs(2, 130, 6, 16, dtype, device)
    scan = SelectiveScan()
    state = torch.randn(2, 6, 16, device=device)  # float32: chunks lose nothing
    whole, whole_state = scan.forward_with_state(*tensors, state)
    y, last = chunked(scan, tensors, length, state)
    assert last.dtype == torch.float32
    eps = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(y, whole, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(last, whole_state, rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_chunks(device):
    tensors = [tensor.requires_grad_() for tensor in inputs(1, 20, 4, 8, torch.float32, device)]
    whole = torch.autograd.grad(SelectiveScan()(*tensors).square().sum(), tensors)
    parts = torch.autograd.grad(chunked(SelectiveScan(), tensors, 6)[0].square().sum(), tensors)
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-3, atol=1e-4)


def test_clear_errors(device):
    u, delta, A, B, C, D = inputs(2, 10, 6, 16, torch.float32, device)
    scan = SelectiveScan()
    with pytest.raises(ValueError, match=r"B_ssm must have shape \(B, L, N\) = \(2, 10, 16\), got \(2, 16, 10\)"):
        scan(u, delta, A, B.transpose(1, 2), C, D)
    with pytest.raises(TypeError, match="delta must have the dtype of u, float32, got float16"):
        scan(u, delta.half(), A, B, C, D)
    with pytest.raises(ValueError, match=r"h_prev must have shape \(B, D, N\)"):
        scan(u, delta, A, B, C, D, torch.zeros(2, 16, 6, device=device))


@pytest.mark.gpu
def test_1280_by_1280_steps_in_chunks(cuda):
    """A stream of 1280 chunks of 1280 steps with D 2048 equals one call, which is made for 32 of its channels."""
    length, count, dim, dstate = 1280, 1280, 2048, 16
    scan, dtype = SelectiveScan(), torch.bfloat16
    u, delta, A, B, C, D = inputs(1, length, dim, dstate, dtype, cuda)
    state = torch.zeros(1, dim, dstate, device=cuda)
    total = torch.zeros(1, length, dim, device=cuda)
    generator = torch.Generator(device=cuda).manual_seed(1)
    picked = slice(0, 32)  # channels are independent: one call over all steps is held for these
    kept_u, kept_delta, kept_y, kept_B, kept_C = [], [], [], [], []
    for _ in range(count):
        u.normal_(generator=generator)
        y, state = scan.forward_with_state(u, delta, A, B, C, D, state)
        total += y
        for kept, tensor in ((kept_u, u), (kept_delta, delta), (kept_y, y)):
            kept.append(tensor[:, :, picked].clone())
        kept_B.append(B)
        kept_C.append(C)
    whole, whole_state = scan.forward_with_state(
        torch.cat(kept_u, 1),
        torch.cat(kept_delta, 1),
        A[picked],
        torch.cat(kept_B, 1),
        torch.cat(kept_C, 1),
        D[picked],
        torch.zeros(1, 32, dstate, device=cuda),
    )
    assert total.isfinite().all()
    torch.testing.assert_close(torch.cat(kept_y, 1), whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(state[:, picked], whole_state, rtol=1e-3, atol=1e-3)
