"""Mamba-2's scan over long sequences, and over tensors beyond 2^31 elements."""

import pytest
import torch
from _helpers.cases import SsdCase, assert_close_to_truth, outputs_and_gradients

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan, mamba_chunk_scan_combined


def of_some_heads(tensors, heads):
    """Heads of one group do not see each other."""
    picked = dict(tensors)
    for name in ("x", "dt"):
        picked[name] = tensors[name][:, :, heads]
    for name in ("A", "D", "dt_bias"):
        picked[name] = tensors[name][heads]
    return picked


def run(function, tensors):
    return outputs_and_gradients(
        lambda **t: function(**t, chunk_size=64, dt_softplus=True, return_final_states=True), tensors
    )


def run_wide(tensors):
    """By chunks in float64: 16384 steps one after the other would take minutes."""
    wide = {name: t.double() if t is not None and t.is_floating_point() else t for name, t in tensors.items()}
    return run(mamba_chunk_scan, wide)


@pytest.mark.parametrize("seq_idx", [False, True])
def test_16384_steps(seq_idx, device):
    """Values and gradients; dA and ddt_bias are sums over all steps."""
    headdim = 64 if device == "cuda" else 16
    tensors = SsdCase(1, 16384, 2, headdim, dstate=32, seq_idx=seq_idx).inputs(torch.float32, device)
    torch.set_num_threads(2)
    found = run(mamba_chunk_scan_combined, tensors)
    torch.set_num_threads(1)  # torch's own wait for each other on a busy machine
    assert_close_to_truth(found, run(mamba_chunk_scan, tensors), run_wide(tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,atol", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_32768_steps_of_many_heads(dtype, atol, cuda):
    """The outputs of two heads among 64; bfloat16: tensor cores take states and products rounded to it."""
    tensors = SsdCase(1, 32768, 64, 64, dstate=128).inputs(dtype, cuda)
    options = {"chunk_size": 64, "dt_softplus": True, "return_final_states": True}
    heads = torch.tensor([5, 63], device=cuda)
    with torch.no_grad():
        out, states = mamba_chunk_scan_combined(**tensors, **options)
        some = of_some_heads(tensors, heads)
        plain = mamba_chunk_scan(**some, **options)
        wide = {name: t.double() if t is not None and t.is_floating_point() else t for name, t in some.items()}
        truth = mamba_chunk_scan(**wide, **options)
    names = ("out", "states")
    found = out[:, :, heads], states[:, heads]
    assert_close_to_truth(*(dict(zip(names, values, strict=True)) for values in (found, plain, truth)), atol)


@pytest.mark.gpu
def test_more_than_two_billion_elements(cuda):
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    batch, seqlen, nheads, headdim, dstate = 2, 2**18 + 64, 65, 64, 16
    x = torch.randn(batch, seqlen, nheads, headdim, device=cuda, dtype=torch.bfloat16)
    assert x.numel() > 2**31
    dt = torch.full((1, 1, 1), 0.1, device=cuda, dtype=torch.bfloat16).expand(batch, seqlen, nheads)
    A = -torch.rand(nheads, device=cuda) - 0.1
    B = torch.randn(batch, seqlen, 1, dstate, device=cuda, dtype=torch.bfloat16)
    out = mamba_chunk_scan_combined(x, dt, A, B, B, 64)
    for b, h in ((0, 0), (batch - 1, nheads - 1), (1, 30)):
        head, entry = slice(h, h + 1), slice(b, b + 1)
        alone = mamba_chunk_scan_combined(x[entry, :, head], dt[entry, :, head], A[head], B[entry], B[entry], 64)
        torch.testing.assert_close(out[b, :, h], alone[0, :, 0], rtol=2e-2, atol=2e-2 * alone.abs().max().item())
