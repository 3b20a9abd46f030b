"""Calls whose like was seen before skip checks and plans: whatever else is given must not be taken for the same."""

import threading

import pytest
import torch

from mamba_ssm._torch import plans
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

CLOSE = {"rtol": 2e-3, "atol": 2e-3}  # both compute in float32, of 20 steps
TIMES = 3  # the first call makes a plan, the second takes it
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")


def tensors(device, batch=2, dim=6, length=20, dstate=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (batch, dim, length), (batch, dstate, length)
    shapes = wide, wide, (dim, dstate), narrow, narrow, (dim,), wide, (dim,)
    made = [torch.rand(*shape, generator=generator) - 0.5 for shape in shapes]
    made[2] -= 1
    return {name: tensor.to(device) for name, tensor in zip(NAMES, made, strict=True)}


@pytest.fixture(autouse=True)
def _fresh_plans():
    plans.forget()


def gradients(function, given, **options):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    out = function(**leaves, **options)
    outs = out if isinstance(out, tuple) else (out,)
    dout = [torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape) for o in outs]
    return [*outs, *torch.autograd.grad(outs, list(leaves.values()), dout)]


def check(given, **options):
    for _ in range(TIMES):
        expected = gradients(selective_scan_ref, given, **options)
        torch.testing.assert_close(gradients(selective_scan_fn, given, **options), expected, **CLOSE)
        with torch.no_grad():
            found = selective_scan_fn(**given, **options)
        found = found if isinstance(found, tuple) else (found,)
        torch.testing.assert_close(list(found), expected[: len(found)], **CLOSE)
        for tensor in given.values():
            tensor.mul_(0.75)


def test_options_in_turns(device):
    given = tensors(device)
    for _ in range(TIMES):
        check(given)
        check(given, delta_softplus=True)
        check(given, return_last_state=True)
        check(given, reverse=True)
        check({name: tensor for name, tensor in given.items() if name != "z"})
        check({name: tensor for name, tensor in given.items() if name != "D"})
        check(given | {"initial_state": torch.ones(2, 6, 4, device=device)}, return_last_state=True)


def test_lengths_that_are_split(device):
    """CUDA's kernels then need memory to work in, forward and backward."""
    check(tensors(device, batch=1, dim=4, length=700), delta_softplus=True)


def test_layouts_in_turns(device):
    given = tensors(device)
    u = given["u"]
    apart = torch.zeros(2, 6, 40, device=device)[..., ::2].copy_(u)  # has to be copied for kernels
    rows = torch.zeros(2, 12, 20, device=device)[:, :6].copy_(u)
    channels_last = u.transpose(1, 2).contiguous().transpose(1, 2)
    off = torch.zeros(u.numel() + 1, device=device)[1:].view(u.shape).copy_(u)  # 4 bytes past a multiple of 16
    turned = u.transpose(0, 1).contiguous().transpose(0, 1)
    for _ in range(TIMES):
        for layout in (u, apart, rows, channels_last, off, turned):
            check(given | {"u": layout})
            check(given | {"z": layout})


def test_what_is_copied_for_kernels(device):
    given = tensors(device)
    A, B, C = (given[name].mT.contiguous().mT for name in ("A", "B", "C"))
    for _ in range(TIMES):
        check(given | {"B": B, "C": C})
        check(given | {"A": A, "B": B})
        check(given | {"C": C, "initial_state": torch.ones(2, 4, 6, device=device).mT}, return_last_state=True)


def test_what_is_copied_for_kernels_and_written_before_backward_is_noticed(device):
    for _ in range(TIMES):
        given = tensors(device)
        given["B"] = given["B"].mT.contiguous().mT
        out = selective_scan_fn(**given | {"u": given["u"].requires_grad_()})
        given["B"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_deterministic_or_not_in_turns(monkeypatch, device):
    given = tensors(device, batch=1, dim=4, length=300)
    expected = gradients(selective_scan_ref, given, delta_softplus=True)
    for value in ("1", "0") * TIMES:
        monkeypatch.setenv("MAMBA_DETERMINISTIC", value)
        torch.testing.assert_close(gradients(selective_scan_fn, given, delta_softplus=True), expected, **CLOSE)


@pytest.mark.parametrize("length", [1, 20])
def test_gradients_in_any_layout(length, device):
    given = tensors(device, length=length)
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    out, expected = selective_scan_fn(**leaves), selective_scan_ref(**leaves)
    dense = torch.rand(2, 6, length, device=device)
    wide = torch.rand(2, 6, 2 * length, device=device)
    for dout in (dense, wide[..., ::2], wide[..., 1 : length + 1], dense[:1].expand(2, 6, length), dense + 1):
        for _ in range(TIMES):
            found = torch.autograd.grad(out, leaves.values(), dout, retain_graph=True)
            truth = torch.autograd.grad(expected, leaves.values(), dout, retain_graph=True)
            torch.testing.assert_close(found, truth, **CLOSE)


def test_what_does_not_fit_is_refused_after_what_fits(device):
    given = tensors(device)
    for _ in range(TIMES):
        gradients(selective_scan_fn, given)
        with pytest.raises(TypeError, match="delta must have the dtype of u"):
            selective_scan_fn(**given | {"delta": given["delta"].half()})
        with pytest.raises(ValueError, match="z must have shape"):
            selective_scan_fn(**given | {"z": given["z"][:, :5]})
        with pytest.raises(ValueError, match="A must have shape"):
            selective_scan_fn(**given | {"A": given["A"][:5]})
        with pytest.raises(TypeError, match="u must be a dense tensor"):
            selective_scan_fn(**given | {"u": given["u"].to_sparse()})
    narrow = {name: given[name].half() for name in ("A", "D", "delta_bias")}
    for _ in range(TIMES):
        wide = {name: tensor.float() for name, tensor in narrow.items()}
        torch.testing.assert_close(selective_scan_fn(**given | narrow), selective_scan_fn(**given | wide))


def test_parameters_that_get_other_memory_before_backward(device):
    """As sharded parameters do."""
    for _ in range(TIMES):
        given = {name: tensor.requires_grad_() for name, tensor in tensors(device).items()}
        out, expected = selective_scan_fn(**given), selective_scan_ref(**given)
        truth = torch.autograd.grad(expected.sum(), given.values())
        old = given["A"].data
        given["A"].data = old.clone()
        old.fill_(torch.nan)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given.values()), truth, **CLOSE)


def test_parameters_that_get_another_shape_before_backward(device):
    """In the memory that they had."""
    for _ in range(TIMES):
        given = {name: tensor.requires_grad_() for name, tensor in tensors(device, dim=4).items()}
        out = selective_scan_fn(**given)
        given["A"].data = given["A"].data.t()
        expected = selective_scan_ref(**given)  # of what A is now: there are no states of before in so short a scan
        found = torch.autograd.grad(out.sum(), given.values())
        torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), given.values()), **CLOSE)
        given = {name: tensor.requires_grad_() for name, tensor in tensors(device).items()}
        out = selective_scan_fn(**given)
        given["A"].data = given["A"].data[:1]
        with pytest.raises((ValueError, RuntimeError), match="A must have shape"):
            torch.autograd.grad(out.sum(), given.values())


def test_inputs_that_are_written_before_backward_are_noticed(device):
    for _ in range(TIMES):
        given = tensors(device)
        out = selective_scan_fn(**given | {"u": given["u"].requires_grad_()})
        given["delta"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_second_derivatives(device):
    given, found = tensors(device), []
    for _ in range(TIMES):
        u = given["u"].detach().requires_grad_()
        (du,) = torch.autograd.grad(selective_scan_fn(**given | {"u": u}).square().sum(), u, create_graph=True)
        found += torch.autograd.grad(du.square().sum(), u)
    assert found[0].abs().max() > 0
    for second in found:
        torch.testing.assert_close(second, found[0])


def test_saved_tensors_hooks(device):
    """Which may give back what they like."""
    given = tensors(device, length=150)
    for _ in range(TIMES):
        expected = gradients(selective_scan_fn, given)
    for _ in range(TIMES):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.clone()):
            found = gradients(selective_scan_fn, given)
        torch.testing.assert_close(found, expected)


def test_more_lengths_than_are_kept(monkeypatch, device):
    monkeypatch.setattr(plans, "_MOST", 16)
    for length in (*range(1, 40), *range(1, 40)):
        given = tensors(device, batch=1, dim=2, length=length, dstate=1)
        with torch.no_grad():
            torch.testing.assert_close(selective_scan_fn(**given), selective_scan_ref(**given), **CLOSE)


def test_threads(device):
    sets = [tensors(device, length=length, seed=length) for length in (5, 20, 70)]
    expected = [gradients(selective_scan_ref, given) for given in sets]
    failures = []

    def work(first):
        try:
            for turn in range(20):
                which = (first + turn) % len(sets)
                torch.testing.assert_close(gradients(selective_scan_fn, sets[which]), expected[which], **CLOSE)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
