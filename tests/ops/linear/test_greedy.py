"""Greedy decoding's choice: torch's argmax to the index, and what the next step of a CUDA graph reads."""

import copy

import pytest
import torch

from mamba_ssm.ops.linear import NextStep, greedy_step, greedy_step_ref, greedy_token
from mamba_ssm.utils.kernels import launches
from mamba_ssm.utils.reference import plain_torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def logits_of(rows, vocabulary, dtype, device, gap=0, levels=None):
    """levels: so many different values, and so as many equal ones."""
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = torch.randn(rows, vocabulary + gap, generator=generator)
    if levels is not None:
        logits = (logits * levels / 6).round()
    return logits.to(device, dtype)[:, :vocabulary]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 8, 59, 256, 257, 8191, 50277])
def test_it_is_argmax(vocabulary, dtype, device):
    for rows in (0, 1, 2, 5):
        for gap in (0, 3, 8):
            for levels in (None, 3):
                logits = logits_of(rows, vocabulary, dtype, device, gap, levels)
                assert torch.equal(greedy_token(logits), logits.argmax(dim=-1))
    logits = logits_of(3, vocabulary + 1, dtype, device)[:, 1:]  # not aligned
    assert torch.equal(greedy_token(logits), logits.argmax(dim=-1))
    logits = logits_of(vocabulary, 3, dtype, device).T
    assert torch.equal(greedy_token(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_and_equal_ones(dtype, device):
    least = torch.finfo(dtype).smallest_normal / 2  # subnormal
    rows = [
        ([-INF] * 4, 0),
        ([-INF, NAN, INF, NAN], 1),
        ([INF, INF, -INF, 1.0], 0),
        ([-1.0, -0.0, 0.0, -1.0], 1),
        ([-1.0, 0.0, -0.0, -1.0], 1),
        ([0.0, least, -least, least], 1),
        ([-2 * least, -least, -2 * least, -INF], 1),
        ([-NAN, 1.0, NAN, 2.0], 0),
    ]
    for padding in (0, 500):  # of a row that several threads look at, or blocks
        logits = torch.full((len(rows), 4 * (padding + 1)), -INF)
        for row, (values, _) in enumerate(rows):
            logits[row, :: padding + 1] = torch.tensor(values)
        expected = torch.tensor([place for _, place in rows]) * (padding + 1)
        assert torch.equal(greedy_token(logits.to(device, dtype)).cpu(), expected)


def test_every_place_of_a_row(device):
    size = 2100
    logits = torch.zeros(size, size, device=device)
    logits.fill_diagonal_(1.0)
    assert torch.equal(greedy_token(logits), torch.arange(size, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eos", [None, [7], [3, 7, 11]], ids=str)
def test_a_step_is_the_references(eos, dtype, device):
    rows, length = 5, 9
    ends = torch.tensor([2, 2, 4, 8, 0], device=device)
    step = NextStep(
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows, length + 2), -1, device=device)[:, :length],
        ends,
        ends - 1,
        ends.int() + 3,
        None if eos is None else torch.tensor(eos, device=device),
        None if eos is None else torch.tensor([False, True, False, False, True], device=device),
    )
    expected = NextStep(*[copy.deepcopy(tensor) for tensor in step])
    logits = logits_of(rows, 40, dtype, device)
    logits[0, 7] = logits[1, 7] = logits[2, 11] = logits[3, 20] = 9.0
    greedy_step(logits, step)
    greedy_step_ref(logits, expected)
    for found, wanted in zip(step, expected, strict=True):
        assert found is wanted or torch.equal(found, wanted)
    if eos == [3, 7, 11]:
        assert step.tokens[:3].tolist() == [7, 3, 11] and step.ended.tolist() == [True, True, True, False, True]


@pytest.mark.gpu
def test_the_kernel_runs(cuda):
    def count():
        return sum(launch.launches for launch in launches() if launch.kernel.op == "greedy_token")

    before = count()
    greedy_token(torch.zeros(1, 9, device=cuda))
    assert count() == before + 1


def test_what_has_no_kernel():
    logits = torch.randn(3, 50, dtype=torch.float64)
    assert torch.equal(greedy_token(logits), logits.argmax(-1))
    logits = torch.randn(2, 3, 50)
    assert torch.equal(greedy_token(logits), logits.argmax(-1))
    with plain_torch():
        assert torch.equal(greedy_token(logits[0]), logits[0].argmax(-1))
    with pytest.raises(IndexError):
        greedy_token(torch.empty(2, 0))
