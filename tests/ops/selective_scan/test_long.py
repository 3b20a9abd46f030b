"""Lengths of 16384 and 32768 against the reference, many more steps, and tensors beyond 2^31 elements."""

import pytest
import torch
from _helpers.cases import ScanCase, assert_close_to_truth

from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

SOME = 8  # channels that the reference computes: channels do not see each other


def of_some_channels(tensors, channels):
    picked = {name: tensors[name] for name in ("B", "C", "seq_idx")}
    for name in ("u", "delta", "z"):
        picked[name] = tensors[name][:, channels]
    for name in ("A", "D", "delta_bias"):
        picked[name] = tensors[name][channels]
    return picked


def check(case, dtype, device):
    tensors = case.inputs(dtype, device)
    torch.set_num_threads(2)
    out, state = selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)
    torch.set_num_threads(1)  # torch's own wait for each other in each small step of the reference
    channels = torch.linspace(0, case.dim - 1, SOME).long().to(device)
    found = {"out": out[:, channels], "state": state[:, channels]}
    some = {name: None if t is None else t.cpu() for name, t in of_some_channels(tensors, channels).items()}
    results = []
    for working in (None, torch.float64):
        converted = {
            name: t.to(working) if working and t is not None and t.is_floating_point() else t
            for name, t in some.items()
        }
        plain_out, plain_state = selective_scan_ref(**converted, delta_softplus=True, return_last_state=True)
        results.append({"out": plain_out, "state": plain_state})
    assert_close_to_truth(found, *results)


def test_16384_steps_on_the_cpu():
    check(ScanCase(1, 768, 16384), torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dim,dtype", [(768, torch.float32), (1024, torch.bfloat16), (2048, torch.float32)], ids=str)
@pytest.mark.parametrize("seqlen", [16384, 32768])
def test_long_on_the_gpu(seqlen, dim, dtype, cuda):
    check(ScanCase(1, dim, seqlen), dtype, cuda)


@pytest.mark.gpu
def test_gradients_of_a_long_sequence(cuda):
    """Gradients of one call equal those of the same call on the CPU, for a length that is cut into many pieces."""
    case = ScanCase(1, 40, 20011, initial_state=True)
    grads = []
    for device in (cuda, "cpu"):
        tensors = {
            name: t.requires_grad_() if t is not None and t.is_floating_point() else t
            for name, t in case.inputs(torch.float32, device).items()
        }
        out, state = selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)
        (out.square().mean() + state.square().mean()).backward()
        grads.append({name: t.grad.cpu() for name, t in tensors.items() if t is not None and t.requires_grad})
    for name, grad in grads[0].items():
        expected = grads[1][name]
        torch.testing.assert_close(grad, expected, rtol=2e-3, atol=2e-3 * expected.abs().max().item(), msg=name)


@pytest.mark.gpu
def test_more_than_two_billion_elements(cuda):
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    batch, dim, seqlen, dstate = 2, 2049, 2**19 + 64, 4
    u = torch.randn(1, 1, seqlen, device=cuda, dtype=torch.bfloat16).expand(batch, dim, seqlen)
    delta = torch.full_like(u[:1, :1], 0.1).expand(batch, dim, seqlen)
    A = -torch.rand(dim, dstate, device=cuda)
    B = torch.randn(batch, 1, dstate, seqlen, device=cuda, dtype=torch.bfloat16)
    u = u.contiguous()
    assert u.numel() > 2**31
    out = selective_scan_fn(u, delta, A, B, B)
    for b, d in ((0, 0), (batch - 1, dim - 1), (1, 1000)):
        alone = selective_scan_fn(u[b : b + 1, d : d + 1], delta[:1, :1], A[d : d + 1], B[b : b + 1], B[b : b + 1])
        torch.testing.assert_close(out[b, d], alone[0, 0], rtol=2e-2, atol=2e-2)
