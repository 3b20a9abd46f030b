"""What a part of a sequence passes on: the scan's last state, the gradient of its initial state, and the decay."""

import pytest
import torch
from _helpers.cases import ScanCase

from mamba_ssm._torch import make
from mamba_ssm.ops.selective_scan.arguments import Inputs, Options
from mamba_ssm.ops.selective_scan.carry import carried_backward, carried_forward, scan_carry
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

CASES = {
    "one_step": ScanCase(2, 3, 1),
    "many_segments": ScanCase(1, 24, 2500),
    "prime_sizes": ScanCase(2, 37, 131, 5),
    "wide_state": ScanCase(1, 7, 700, 67),
    "widest_state": ScanCase(1, 5, 130, 256),
    "eight_states": ScanCase(2, 16, 600, 8),
    "groups": ScanCase(2, 12, 200, groups=3),
    "constant_B": ScanCase(1, 6, 600, variable_B=False),
    "constant_C": ScanCase(1, 6, 600, variable_C=False),
    "ungated": ScanCase(2, 9, 90, z=False),
    "half_a_tile": ScanCase(1, 64, 1056),  # CUDA scans it in tiles of 32 steps, and what it passes on in tiles of 64
    "empty_batch": ScanCase(0, 4, 9),
    "no_steps": ScanCase(2, 4, 0),
}


def record(tensors):
    return make(Inputs, tuple(tensors.get(name) for name in Inputs._fields))


def state_and_factor(carry, A):
    """Of what a part passes on, (B, D, N) each."""
    return (part.view(carry.shape).unflatten(1, A.shape) for part in carry.passed_on.chunk(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_carry(name, dtype, device):
    inputs = record(CASES[name].inputs(dtype, device))
    dout = torch.randn(inputs.u.shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    state, factor = state_and_factor(scan_carry(inputs, Options(True)), inputs.A)
    gradient, same_factor = state_and_factor(scan_carry(inputs, Options(True), dout), inputs.A)

    wide = [None if tensor is None else tensor.cpu().double() for tensor in inputs]
    start = torch.zeros(state.shape, dtype=torch.float64, requires_grad=True)
    given = make(Inputs, wide)._replace(initial_state=start)
    out, last = selective_scan_ref(*given[:8], True, True, start)
    out = out + 0 * last.sum()  # of no steps, out alone does not depend on start
    (expected_gradient,) = torch.autograd.grad(out, start, dout.cpu().double())
    ones = torch.ones_like(start)
    _, decayed = selective_scan_ref(torch.zeros_like(given.u), *given[1:8], True, True, ones)
    for found, expected in ((state, last), (gradient, expected_gradient), (factor, decayed), (same_factor, decayed)):
        expected = expected.detach()
        scale = 1 + float(expected.abs().max()) if expected.numel() else 1
        torch.testing.assert_close(found.cpu().double() / scale, expected / scale, rtol=1e-4, atol=1e-5)


def test_an_overflowed_factor_does_not_reach_a_state_of_zero(device):
    tensors = ScanCase(1, 4, 1600).inputs(torch.float32, device)
    tensors.update(A=torch.ones_like(tensors["A"]) * 3, u=torch.zeros_like(tensors["u"]))  # grows beyond float32
    state, factor = state_and_factor(scan_carry(record(tensors), Options(True)), tensors["A"])
    assert state.eq(0).all() and factor.isinf().all()


@pytest.mark.parametrize("name", ["one_step", "many_segments", "prime_sizes", "wide_state", "no_steps"])
def test_the_second_calls_go_on_from_the_first(name, device):
    """With a state before the part and a gradient behind it, as one call with these gives."""
    tensors = CASES[name].inputs(torch.float32, device)
    shape = *tensors["u"].shape[:2], tensors["A"].shape[1]
    before, dlast = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(device) for n in (4, 5))
    dout = torch.randn(tensors["u"].shape, generator=torch.Generator().manual_seed(3)).to(device)
    names = [key for key in Inputs._fields[:8] if tensors[key] is not None]
    leaves = {key: tensors[key].clone().requires_grad_() for key in names}
    expected, last = selective_scan_fn(**leaves, delta_softplus=True, return_last_state=True, initial_state=before)
    torch.autograd.backward((expected, last), (dout, dlast))

    inputs = record({**tensors, "initial_state": before})
    out, checkpoints = carried_forward(inputs, Options(True), scan_carry(inputs, Options(True)))
    torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-4)
    carry = scan_carry(inputs, Options(True), dout)
    grads = carried_backward(dout, dlast, inputs, checkpoints, Options(True), carry)
    for key in names:
        true = leaves[key].grad
        close = {"rtol": 1e-3, "atol": 1e-4 * (1 + float(true.abs().max())) if true.numel() else 0}
        torch.testing.assert_close(getattr(grads, key), true, **close, msg=lambda text, key=key: f"d{key}: {text}")
