"""Rows of a cache of states, and positions in it: int64 as int32, values that 32 bits cannot hold, rows named twice."""

import pytest
import torch

from mamba_ssm.ops.causal_conv1d import causal_conv1d_update, causal_conv1d_update_ref
from mamba_ssm.ops.triton.selective_state_update import selective_state_update

INT64 = torch.iinfo(torch.int64)


def state_update(indices, state):
    x, matrix, A = torch.ones(2, 8), torch.ones(2, 4), -torch.ones(8, 4)
    x, matrix, A = (tensor.to(state.device) for tensor in (x, matrix, A))
    return selective_state_update(state, x, x, A, matrix, matrix, state_batch_indices=indices)


def conv_update(indices, state):
    x, weight = torch.ones(2, 8, device=state.device), torch.ones(8, 4, device=state.device)
    return causal_conv1d_update(x, state, weight, conv_state_indices=indices)


OPS = pytest.mark.parametrize("update", [state_update, conv_update])


@OPS
def test_int64_rows(update, device):
    state = torch.randn(3, 8, 4, device=device)
    results = []
    for dtype in (torch.int32, torch.int64):
        written = state.clone()
        results.append((update(torch.tensor([2, -1], dtype=dtype, device=device), written), written))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@OPS
def test_padding_below_32_bits(update, device):
    state = torch.zeros(3, 8, 4, device=device)
    out = update(torch.tensor([0, INT64.min + 1], device=device), state)
    assert not out[1].any()
    assert state[0].any()
    assert not state[1:].any()


@OPS
@pytest.mark.parametrize("row", [3, 2**31, 2**32 + 1, INT64.max])
def test_rows_beyond_the_cache(row, update, device):
    state = torch.zeros(3, 8, 4, device=device)
    indices = torch.tensor([0, row], device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=f"indices must be less than the number of rows.*, 3, got {row}"):
            update(indices, state)
        assert not state.any()
    else:  # which cannot say so without a synchronisation
        out = update(indices, state)
        assert out[1].isnan().all()
        assert state[0].any()
        assert not state[1:].any()


@OPS
def test_a_row_named_twice(update):
    with pytest.raises(ValueError, match="indices must not name a row twice, got 1 more than once"):
        update(torch.tensor([1, 1], dtype=torch.int32), torch.zeros(3, 8, 4))
    assert not update(torch.tensor([-1, -1]), torch.zeros(3, 8, 4)).any()  # padding may


def test_positions_of_64_bits(device):
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, 4, device=device)
    state = torch.randn(3, 8, 7, device=device)
    expected_state, cache_seqlens = state.clone(), torch.tensor([5, 2**32 + 1, INT64.max], device=device)
    expected = causal_conv1d_update_ref(x, expected_state, weight, cache_seqlens=cache_seqlens)
    out = causal_conv1d_update(x, state, weight, cache_seqlens=cache_seqlens)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, expected_state)


def test_negative_positions():
    x, state, weight = torch.ones(2, 8), torch.zeros(2, 8, 4), torch.ones(8, 4)
    cache_seqlens = torch.tensor([0, -1], dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_seqlens must be at least 0, got -1"):
        causal_conv1d_update(x, state, weight, cache_seqlens=cache_seqlens)
    padded = torch.tensor([1, -1])  # whose position nobody reads
    causal_conv1d_update(x, state, weight, cache_seqlens=cache_seqlens, conv_state_indices=padded)
