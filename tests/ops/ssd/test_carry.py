"""What a part of a sequence passes on, found by its pieces: the scan's final states, the gradient of its initial states
and the decay; and what reaches each piece.
"""

import pytest
import torch

from mamba_ssm._torch import make
from mamba_ssm.ops.carry import passed_on, reaching
from mamba_ssm.ops.ssd import carry
from mamba_ssm.ops.ssd import ssd_chunk_scan_combined_ref as reference
from mamba_ssm.ops.ssd.arguments import Inputs, Options, Sizes


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.02, 0.1)], ids=["no_limit", "limit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "pieces,sizes",
    [(1, (2, 131, 4, 8, 2, 16)), (1, (1, 1, 2, 3, 1, 5)), (2, (1, 1500, 3, 16, 1, 7)), (3, (2, 1539, 2, 8, 1, 4))],
    ids=str,
)
def test_carry(pieces, sizes, dtype, limit, device):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    whole = make(Sizes, sizes)
    batch, seqlen, heads, headdim, groups, dstate = sizes
    x, dout = (normal(batch, seqlen, heads, headdim).to(dtype).to(device) for _ in range(2))
    B, C = (normal(batch, seqlen, groups, dstate).to(dtype).to(device) for _ in range(2))
    dt = (normal(batch, seqlen, heads) - 7).to(dtype).to(device)  # decays that reach over all pieces
    A, bias = -torch.rand(heads, generator=generator).to(device), 0.1 * normal(heads).abs().to(device)
    start, dlast = (normal(*whole.states).to(device) for _ in range(2))

    cut = carry.cut_length(whole)
    assert (cut.batch, cut.seqlen) == (batch * pieces, seqlen // pieces)
    x_cut, dout_cut, dt_cut, B_cut, C_cut = (
        tensor.reshape(cut.batch, cut.seqlen, *tensor.shape[2:]) for tensor in (x, dout, dt, B, C)
    )
    options = Options(True, *limit)
    steps = carry.steps_of(dt, bias, options, cut)
    decays, factors = carry.decays_of(steps, A), carry.factors_of(steps, A)
    inputs = make(Inputs, (x_cut, dt_cut, A, B_cut, C_cut, None, None, bias, None, None))
    passed = carry.last_states(cut, inputs, options).view(*factors.shape, -1)
    together = passed_on(passed, factors)
    state, factor = together[: start.numel()].view(start.shape), together[start.numel() :].view(batch, heads, 1, 1)
    before = reaching(passed, factors, start).unflatten(3, (headdim, dstate))
    first = carry.first_gradients(cut, dout_cut, C_cut, decays).view(*factors.shape, -1)
    gradient = passed_on(first, factors, from_end=True)[: start.numel()].view(start.shape)
    after = reaching(first, factors, dlast, from_end=True).unflatten(3, (headdim, dstate))

    x, dout, dt, A, B, C, bias, start, dlast = (
        tensor.cpu().double() for tensor in (x, dout, dt, A, B, C, bias, start, dlast)
    )
    rest = {"dt_bias": bias, "dt_softplus": True, "dt_limit": limit, "return_final_states": True}

    def scan(first, last, states, x=x):
        x, dt_part, B_part, C_part = (tensor[:, first:last] for tensor in (x, dt, B, C))
        return reference(x, dt_part, A, B_part, C_part, 64, initial_states=states, **rest)

    zero = torch.zeros_like(start, requires_grad=True)
    out, expected_state = scan(0, seqlen, zero)
    (expected_gradient,) = torch.autograd.grad(out, zero, dout)
    _, expected_factor = scan(0, seqlen, torch.ones_like(start), torch.zeros_like(x))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(factor.cpu().double().expand_as(start), expected_factor, **close)
    ends = [seqlen * piece // pieces for piece in range(pieces + 1)]
    expected_before = torch.stack([scan(0, end, start)[1] for end in ends[:-1]], 1)
    expected_after = []
    for end in ends[1:]:
        entering = torch.zeros_like(start, requires_grad=True)
        out, last = scan(end, seqlen, entering)
        loss = (out * dout[:, end:]).sum() + (last * dlast).sum()
        expected_after.append(torch.autograd.grad(loss, entering)[0])
    if dtype == torch.bfloat16:
        close = {"rtol": 4e-3, "atol": 4e-3}  # inputs times their weight are rounded to bfloat16
    for found, expected in (
        (state, expected_state),
        (gradient, expected_gradient),
        (before, expected_before),
        (after, torch.stack(expected_after, 1)),
    ):
        expected = expected.detach()
        scale = 1 + float(expected.abs().max())
        torch.testing.assert_close(found.cpu().double() / scale, expected / scale, **close)


@pytest.mark.parametrize("seqlen,pieces", [(0, 1), (511, 1), (1024, 2), (65536, 32), (65537, 1), (9 * 1000, 15)])
def test_pieces_divide_the_length(seqlen, pieces):
    cut = carry.cut_length(make(Sizes, (3, seqlen, 1, 1, 1, 1)))
    assert (cut.batch, cut.seqlen) == (3 * pieces, seqlen // pieces)
