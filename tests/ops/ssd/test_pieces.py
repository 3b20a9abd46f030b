"""Upstream's pieces of Mamba-2's scan in plain torch, and the references: they agree with each other in float64."""

import pytest
import torch
from _helpers.cases import SSD_CASES, SsdCase, case_id, outputs_and_gradients

from mamba_ssm.ops.triton.ssd_chunk_scan import chunk_scan, chunk_scan_ref
from mamba_ssm.ops.triton.ssd_chunk_state import (
    _chunk_cumsum_fwd,
    _chunk_state_fwd,
    chunk_state,
    chunk_state_ref,
    chunk_state_varlen,
)
from mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    ssd_chunk_scan_combined_ref,
    ssd_selective_scan,
)
from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_fwd, state_passing, state_passing_ref

SMALL = [case for case in SSD_CASES if case.headdim * case.dstate <= 2048]


def wide(case):
    tensors = case.inputs(torch.float32, "cpu")
    return {name: t.double() if t is not None and t.is_floating_point() else t for name, t in tensors.items()}


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_by_chunks_equals_step_by_step(case, chunk_size):
    """Values and gradients of the composed pieces; float64, so that only sums in another order differ."""
    options = {**case.options(), "chunk_size": chunk_size}

    def run(function):
        return lambda **t: function(**t, **options, return_final_states=True)

    expected = outputs_and_gradients(run(ssd_chunk_scan_combined_ref), wide(case))
    for name, value in outputs_and_gradients(run(mamba_chunk_scan), wide(case)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def test_pieces_in_upstreams_layouts():
    batch, seqlen, heads, headdim, dstate, chunk = 2, 70, 4, 8, 16, 32
    tensors = wide(SsdCase(batch, seqlen, heads, headdim, groups=2, initial_states=True))
    x, dt, A, B, C, D = (tensors[name] for name in ("x", "dt", "A", "B", "C", "D"))
    dA_cumsum, steps = _chunk_cumsum_fwd(dt, A, chunk, dt_bias=tensors["dt_bias"], dt_softplus=True)
    assert dA_cumsum.shape == steps.shape == (batch, heads, 3, chunk)
    assert steps[..., -1, 70 - 64 :].eq(0).all()
    states = chunk_state(B, x, steps, dA_cumsum)
    assert states.shape == (batch, 3, heads, headdim, dstate)
    assert torch.equal(_chunk_state_fwd(B, x, steps, dA_cumsum), states)
    assert _chunk_state_fwd(B.half(), x, steps, dA_cumsum, states_in_fp32=False).dtype == torch.float16
    written = torch.empty_like(states)
    _chunk_state_fwd(B, x, steps, dA_cumsum, states=written)
    assert torch.equal(written, states)
    initial = tensors["initial_states"].flatten(2)
    passed, final = state_passing(states.flatten(3), dA_cumsum[..., -1], initial)
    assert torch.equal(passed[:, 0], initial)
    assert (
        _state_passing_fwd(states.flatten(3), dA_cumsum[..., -1], initial, out_dtype=torch.half)[0].dtype == torch.half
    )
    out = chunk_scan(B, C, x, steps, dA_cumsum, passed.view_as(states), D)
    expected, expected_final = ssd_chunk_scan_combined_ref(
        **tensors, chunk_size=8, dt_softplus=True, return_final_states=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(final.view_as(expected_final), expected_final)
    for name, reference in (
        (chunk_state, chunk_state_ref),
        (state_passing, state_passing_ref),
        (chunk_scan, chunk_scan_ref),
    ):
        assert name is reference


@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial_states"])
def test_varlen_piece(initial):
    bounds = torch.tensor([0, 5, 5, 40, 100], dtype=torch.int32)
    tensors = wide(SsdCase(1, 100, 4, 8, groups=2))
    x, dt, A, B = (tensors[name] for name in ("x", "dt", "A", "B"))
    starts = torch.randn(4, 4, 8, 16, dtype=torch.float64) if initial else None
    expected = []
    for i in range(4):
        part = {name: tensors[name][:, bounds[i] : bounds[i + 1]] for name in ("x", "dt", "B", "C")}
        begin = None if starts is None else starts[i : i + 1]
        expected.append(
            ssd_chunk_scan_combined_ref(**part, A=A, chunk_size=8, initial_states=begin, return_final_states=True)[1]
        )
    # The states that enter the chunks, of the sequence that does: as upstream passes them.
    dA_cumsum, steps = _chunk_cumsum_fwd(dt, A, 32)
    entering = []
    for start in range(0, 128, 32):
        i = int((bounds <= start).sum()) - 1
        part = {name: tensors[name][:, bounds[i] : start] for name in ("x", "dt", "B", "C")}
        begin = None if starts is None else starts[i : i + 1]
        entering.append(
            ssd_chunk_scan_combined_ref(**part, A=A, chunk_size=8, initial_states=begin, return_final_states=True)[1]
            if start < 100
            else torch.zeros_like(expected[0])
        )
    found = chunk_state_varlen(B[0], x[0], steps[0], dA_cumsum[0], bounds, torch.cat(entering), starts)
    torch.testing.assert_close(found, torch.cat(expected))


def test_reference_with_channels_of_their_own():
    """ssd_selective_scan takes dt of every channel and A of every state, as Mamba-1 does."""
    tensors = wide(SsdCase(2, 30, 4, 8, D="dim", z=True))
    del tensors["initial_states"], tensors["seq_idx"]
    expected = ssd_selective_scan(**tensors, dt_softplus=True)
    tensors["dt"] = tensors["dt"][..., None].expand(-1, -1, -1, 8)
    tensors["dt_bias"] = tensors["dt_bias"][:, None].expand(-1, 8)
    tensors["A"] = tensors["A"][:, None, None].expand(-1, 8, 16)
    torch.testing.assert_close(ssd_selective_scan(**tensors, dt_softplus=True), expected)


def test_the_kernels_agree_with_ssd_selective_scan(device):
    tensors = SsdCase(2, 70, 4, 8).inputs(torch.float32, device)
    del tensors["initial_states"], tensors["seq_idx"]
    out = mamba_chunk_scan_combined(**tensors, chunk_size=64, dt_softplus=True)
    torch.testing.assert_close(out, ssd_selective_scan(**tensors, dt_softplus=True), rtol=1e-4, atol=1e-4)
