"""Several native calls by one."""

import pytest
import torch

from mamba_ssm._native import sequences
from mamba_ssm.ops.linear import linear
from mamba_ssm.ops.norm import rms_norm_fn

ROWS, WIDTH = 2, 16


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return [torch.rand(WIDTH, WIDTH) for _ in range(3)]


def record(function, known, shape=(ROWS, WIDTH)):
    with torch.no_grad():
        return sequences.record(function, torch.rand(shape), known)


def layers(weights):
    def function(x):
        for weight in weights:
            x = linear(x, weight)
        return rms_norm_fn(x, weights[0][0], None).view(1, ROWS, WIDTH)

    return function


def test_repeats_the_calls_on_other_inputs(weights):
    function = layers(weights)
    _, sequence = record(function, weights)
    for _ in range(3):
        x = torch.rand(ROWS, WIDTH)
        kept = sequence.run(x)
        assert torch.equal(kept, function(x)) and kept.shape == (1, ROWS, WIDTH)
        weights[1].mul_(0.5)
        assert torch.equal(sequence.run(x), function(x))


def test_takes_what_it_was_recorded_with(weights):
    _, sequence = record(layers(weights), weights)
    assert sequence.takes(torch.rand(ROWS, WIDTH))
    assert not sequence.takes(torch.rand(ROWS + 1, WIDTH))
    assert not sequence.takes(torch.rand(WIDTH, ROWS).t())
    assert not sequence.takes(torch.rand(ROWS, WIDTH).half())
    assert not sequence.takes(torch.rand(ROWS * WIDTH + 1)[1:].view(ROWS, WIDTH)), "its alignment differs"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: linear(x, weight) * 2,
        lambda x, weight: linear(x + 1, weight),
        lambda x, weight: linear(x.t().contiguous(), weight[:, :ROWS]),
        lambda x, weight: linear(x, weight)[:1],
        lambda x, weight: linear(x, torch.rand(WIDTH, WIDTH)),
        lambda x, weight: x.view(-1),
    ],
    ids=["behind", "before", "a copy", "a part of a result", "another weight", "no call"],
)
def test_more_than_native_calls_is_not_recorded(function, weights):
    result, sequence = record(lambda x: function(x, weights[0]), weights)
    assert sequence is None and result.isfinite().all()


def test_memory_that_is_not_known_is_not_used(weights):
    _, sequence = record(layers(weights), weights[:2])
    assert sequence is None


def test_the_first_error_ends_it_and_is_raised(weights):
    _, sequence = record(layers(weights), weights)
    x = torch.rand(ROWS, WIDTH)
    sequence._structs[1].in_features = -1
    sequence._structs[2].out_features = -2
    with pytest.raises(ValueError, match=r"linear: in_features must be at least .*, got -1"):
        sequence.run(x)
    sequence._structs[1].in_features = WIDTH
    with pytest.raises(ValueError, match=r"linear: out_features must be at least .*, got -2"):
        sequence.run(x)
