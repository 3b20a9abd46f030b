"""The sampling rules: each filter against its definition, on distributions worked out by hand."""

import pytest
import torch

from mamba_ssm.utils.generation import (
    modify_logit_for_repetition_penalty,
    modify_logits_for_min_p_filtering,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)

PROBABILITIES = torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1])
DRAWS = 20000


def frequencies(**options):
    """How often each token is drawn, over DRAWS rows of the same logits."""
    logits = PROBABILITIES.log().expand(DRAWS, -1) + 3.0  # logits are log-probabilities up to a constant
    return sample(logits, **options).bincount(minlength=5) / DRAWS


def expected(kept, temperature=1.0):
    weights = torch.zeros(5)
    weights[kept] = PROBABILITIES[kept] ** (1 / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize(
    "options,kept",
    [
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_k": 0, "top_p": 0.65}, [1, 2]),
        ({"top_k": 0, "top_p": 0.75}, [1, 2, 3]),
        ({"top_k": 0, "top_p": 0.01}, [1]),
        ({"top_k": 0, "top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 0, "min_p": 0.26}, [1, 2, 3]),  # at least 0.104
        ({"top_k": 0, "min_p": 1.0}, [1]),
        ({"top_k": 4, "top_p": 0.9}, [1, 2, 3, 4]),  # of the four: 0.42, 0.74, 0.89
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.5}, [1, 2]),
        ({"top_k": 0, "temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "temperature": 2.0}, [1, 2, 3]),
    ],
    ids=str,
)
def test_what_is_drawn(options, kept):
    found = frequencies(**options)
    # five standard deviations of a frequency near one half
    torch.testing.assert_close(
        found, expected(kept, options.get("temperature", 1.0)), rtol=0, atol=5 * 0.5 / DRAWS**0.5
    )
    assert found[[i for i in range(5) if i not in kept]].sum() == 0


def test_greedy(device):
    logits = torch.randn(7, 50, device=device)
    assert torch.equal(sample(logits), logits.argmax(-1))
    assert torch.equal(sample(logits, top_p=0.5, temperature=3.0), logits.argmax(-1))
    assert torch.equal(sample(logits, top_k=0, top_p=1e-6), logits.argmax(-1))
    before = logits.clone()
    sample(logits, top_k=5, top_p=0.5, min_p=0.1, temperature=0.5)
    assert torch.equal(logits, before), "the caller's logits were changed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype, device):
    tokens = sample(torch.randn(7, 50, device=device, dtype=dtype), top_k=5, top_p=0.9)
    assert tokens.shape == (7,) and tokens.dtype == torch.int64
    assert sample(torch.zeros(0, 50, device=device, dtype=dtype)).shape == (0,)


def test_repetition_penalty():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0], [1.0, 1.0, 1.0, -1.0]])
    previous = torch.tensor([[0, 1, 0], [3, 2, 3]])
    found = modify_logit_for_repetition_penalty(logits.clone(), previous, 2.0)
    assert found.tolist() == [[1.0, -4.0, 1.0, 0.0], [1.0, 1.0, 0.5, -2.0]]
    assert torch.equal(modify_logit_for_repetition_penalty(logits.clone(), previous), logits)


def test_filters_in_place():
    logits = torch.tensor([[0.1, 3.0, 0.9, 2.0], [5.0, 1.0, 1.0, 0.0]])
    kept = logits.clone()
    modify_logits_for_top_k_filtering(kept, 2)
    assert kept.isfinite().tolist() == [[False, True, False, True], [True, True, True, False]]  # equal ones stay
    kept = logits.clone()
    modify_logits_for_top_p_filtering(kept, 0.8)  # 0.65, 0.24 and less; 0.96 alone
    assert kept.isfinite().tolist() == [[False, True, False, True], [True, False, False, False]]
    kept = logits.clone()
    modify_logits_for_min_p_filtering(kept, 0.9)
    assert kept.isfinite().tolist() == [[False, True, True, True], [True, True, True, False]]
    kept = logits.clone()
    for off in (0.0, 1.0):
        modify_logits_for_top_p_filtering(kept, off)
        modify_logits_for_min_p_filtering(kept, off)
    assert torch.equal(kept, logits)
