"""What a part of a sequence passes on: the scan's final states, the gradient of its initial states, and the decay."""

import pytest
import torch

from mamba_ssm._torch import make
from mamba_ssm.ops.ssd import ssd_chunk_scan_combined_ref
from mamba_ssm.ops.ssd.arguments import Options, Ungated
from mamba_ssm.ops.ssd.carry import ssd_carry


@pytest.mark.parametrize(
    "softplus,limit", [(True, (0.0, float("inf"))), (False, (0.02, 0.3))], ids=["softplus", "limit"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [(2, 131, 4, 8, 2, 16), (1, 1, 2, 3, 1, 5), (2, 0, 2, 4, 2, 8), (1, 1500, 3, 16, 1, 7)], ids=str
)
def test_carry(sizes, dtype, softplus, limit, device):
    batch, seqlen, heads, headdim, groups, dstate = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x, dout = (normal(batch, seqlen, heads, headdim).to(dtype).to(device) for _ in range(2))
    B, C = (normal(batch, seqlen, groups, dstate).to(dtype).to(device) for _ in range(2))
    dt = (
        (normal(batch, seqlen, heads) - 4 if softplus else normal(batch, seqlen, heads).abs() * 0.1)
        .to(dtype)
        .to(device)
    )
    A, bias = -torch.rand(heads, generator=generator).to(device), 0.1 * normal(heads).abs().to(device)
    inputs = make(Ungated, (x, dt, A, B, C, None, bias, None, None))
    state, factor = ssd_carry(inputs, Options(softplus, *limit))
    gradient, same_factor = ssd_carry(inputs, Options(softplus, *limit), dout)

    wide = [None if tensor is None else tensor.cpu().double() for tensor in inputs[:5]]
    start = torch.zeros(state.shape, dtype=torch.float64, requires_grad=True)
    options = {"dt_bias": bias.cpu().double(), "dt_softplus": softplus, "dt_limit": limit, "return_final_states": True}
    out, last = ssd_chunk_scan_combined_ref(*wide, 64, initial_states=start, **options)
    out = out + 0 * last.sum()  # of no steps, out alone does not depend on start
    (expected_gradient,) = torch.autograd.grad(out, start, dout.cpu().double())
    zero = torch.zeros_like(wide[0])
    _, decayed = ssd_chunk_scan_combined_ref(zero, *wide[1:], 64, initial_states=torch.ones_like(start), **options)
    close = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    )  # inputs times weight
    for found, expected in ((state, last), (gradient, expected_gradient)):
        expected = expected.detach()
        scale = 1 + float(expected.abs().max())
        torch.testing.assert_close(found.cpu().double() / scale, expected / scale, **close)
    for found in (factor, same_factor):
        torch.testing.assert_close(found.cpu().double().expand_as(decayed), decayed, rtol=1e-4, atol=1e-5)
