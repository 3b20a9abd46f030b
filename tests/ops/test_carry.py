"""How pieces and parts of a sequence pass on their states, from what each does from zero on."""

import pytest
import torch

from mamba_ssm.ops.carry import fold, nothing_passed_on, passed_on, reaching


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize(
    "parts,shape",
    [(0, (1, 2, 3, 4)), (1, (2, 3, 4, 5)), (3, (1, 2, 16, 128)), (9, (3, 5, 7, 11)), (4, (2, 301)), (2, (0, 3, 4))],
    ids=str,
)
def test_fold(parts, shape, from_end, device):
    """What each part passes on, in rows with something behind it, from zero on."""
    shape = torch.Size(shape)
    count = shape.numel() + shape[:2].numel()
    everyone = torch.randn(parts, count + 3, generator=torch.Generator().manual_seed(0)).to(device)
    expected = torch.zeros(shape, dtype=torch.float64)
    for row in everyone.cpu().double().flip(0) if from_end else everyone.cpu().double():
        factor = row[shape.numel() : count].view(*shape[:2], *(1 for _ in shape[2:]))
        expected = factor * expected + row[: shape.numel()].view(shape)
    found = fold(everyone, shape, from_end)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("size", [1, 3, 300])
def test_pieces(size, from_end, device):
    """Views whose pieces lie apart, of states with many elements for a factor or with one."""
    batch, pieces, heads = 2, 11, 37
    memory = torch.randn(pieces, 2, batch, heads, size, generator=torch.Generator().manual_seed(0)).to(device)
    passed, factors = memory[:, 0].transpose(0, 1), memory[:, 1, ..., 0].transpose(0, 1)
    outer = torch.randn(batch, heads, size, generator=torch.Generator().manual_seed(1)).to(device)
    together, before = passed_on(passed, factors, from_end), reaching(passed, factors, outer, from_end)
    state, last = outer.cpu().double(), torch.zeros(batch, heads, size, dtype=torch.float64)
    for piece in reversed(range(pieces)) if from_end else range(pieces):
        torch.testing.assert_close(before[:, piece].cpu().double(), state, rtol=1e-4, atol=1e-4)
        factor, end = factors[:, piece, :, None].cpu().double(), passed[:, piece].cpu().double()
        state, last = factor * state + end, factor * last + end
    expected = torch.cat([last.flatten(), factors.cpu().double().prod(1).flatten()])
    torch.testing.assert_close(together.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_a_part_without_steps_passes_on_what_comes(device):
    shape = torch.Size((2, 3, 5))
    state = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    first = torch.cat([state.flatten(), torch.zeros(6, device=device)])
    everyone = torch.stack([first, nothing_passed_on(shape, state.to(torch.bfloat16))])
    torch.testing.assert_close(fold(everyone, shape), state, rtol=0, atol=0)


def test_a_state_that_is_not_finite_reaches_later_pieces_alone(device):
    passed, factors = torch.ones(1, 4, 2, 15, device=device), torch.zeros(1, 4, 2, device=device)
    passed[0, 1, 0] = float("nan")
    before = reaching(passed, factors, None)[0]
    assert before[:2].isfinite().all() and before[2, 0].isnan().all() and before[2:, 1].isfinite().all()


def test_an_overflowed_factor_does_not_reach_a_state_of_zero(device):
    """As step by step: zero times what grows stays zero."""
    passed, factors = torch.zeros(1, 3, 2, 5, device=device), torch.full((1, 3, 2), float("inf"), device=device)
    assert reaching(passed, factors, None).eq(0).all()
    assert passed_on(passed, factors)[:10].eq(0).all()
