"""Packed sequences: one call with seq_idx or cu_seqlens equals a call for each sequence."""

import pytest
import torch
from _helpers.cases import DTYPES, SsdCase, assert_close_to_truth, dtype_id, outputs_and_gradients

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

LENGTHS = (70, 1, 0, 128, 5, 64, 33, 0)
# Each side is computed from other tiles: sums in another order, 16-bit results rounded another way (and on the GPU
# 16-bit operands of the tensor cores, see test_ssd.py).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
ALONG_TIME = ("x", "dt", "B", "C", "z")


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_case(**options):
    return SsdCase(1, sum(LENGTHS), 4, 20, dstate=24, groups=2, z=True, **options)


def one_by_one(tensors, options, initial_states=None):
    """Outputs in a row, and the states after each sequence; initial_states: of the first one."""
    bounds = bounds_of(LENGTHS).tolist()
    outs, states = [], []
    for i in range(len(LENGTHS)):
        part = {name: t[:, bounds[i] : bounds[i + 1]] if name in ALONG_TIME else t for name, t in tensors.items()}
        part["initial_states"] = initial_states if i == 0 else None
        out, state = mamba_chunk_scan_combined(**part, **options, return_final_states=True)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, dim=1), torch.cat(states)


@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial_states"])
@pytest.mark.parametrize("how", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_values_and_gradients(dtype, how, initial, device):
    case = packed_case(initial_states=initial)
    tensors = case.inputs(dtype, device)
    bounds = bounds_of(LENGTHS).to(device)
    if how == "cu_seqlens":
        packed = {"cu_seqlens": bounds}
    else:
        numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(torch.int32)
        packed = {"seq_idx": numbers[None].to(device)}
    del tensors["seq_idx"]

    def together(**t):
        return mamba_chunk_scan_combined(**t, **packed, **case.options())

    def separately(initial_states, **t):
        return one_by_one(t, case.options(), initial_states)[0]

    expected = outputs_and_gradients(separately, tensors)
    found = outputs_and_gradients(together, tensors)
    assert_close_to_truth(found, expected, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("first", [0, 7, -2])
def test_initial_states_are_those_of_the_first_sequence(first, device):
    """Whatever its number: pieces of packed rows, with their part of seq_idx, go on from the piece before."""
    case = packed_case(initial_states=True)
    tensors = case.inputs(torch.float32, device)
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(torch.int32) + first
    tensors["seq_idx"] = numbers[None].to(device)

    def whole(**t):
        return mamba_chunk_scan_combined(**t, **case.options(), return_final_states=True)

    def in_pieces(initial_states, seq_idx, **t):
        outs, state = [], initial_states
        for piece in (slice(0, 40), slice(40, 71), slice(71, 150), slice(150, None)):
            part = {name: tensor[:, piece] if name in ALONG_TIME else tensor for name, tensor in t.items()}
            out, state = whole(**part, initial_states=state, seq_idx=seq_idx[:, piece])
            outs.append(out)
        return torch.cat(outs, dim=1), state

    # a piece that begins with a sequence does not know it
    tensors["seq_idx"][:, 70] = tensors["seq_idx"][:, 71]
    expected = outputs_and_gradients(in_pieces, tensors)
    assert_close_to_truth(outputs_and_gradients(whole, tensors), expected, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("initial", [False, True], ids=["zero", "initial_states"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_states_of_each_sequence(dtype, initial, device):
    case = packed_case(initial_states=initial, dt_limit=(0.1, 0.6))
    tensors = case.inputs(dtype, device)
    tensors["x"].requires_grad_()
    bounds = bounds_of(LENGTHS).to(device)
    initial_states = tensors.pop("initial_states")
    out, states = one_by_one(tensors, case.options(), initial_states)
    results = mamba_chunk_scan_combined(
        **tensors, **case.options(), initial_states=initial_states, cu_seqlens=bounds, return_varlen_states=True,
        return_final_states=True,
    )  # fmt: skip
    found = dict(zip(("out", "final", "varlen"), results, strict=True))
    expected = {"out": out, "final": states[-2:-1], "varlen": states}
    if initial:  # an empty sequence without an initial state of its own leaves zeros
        assert states[2].eq(0).all()
    assert_close_to_truth(found, expected, expected, TOLERANCE[dtype])
    assert not found["varlen"].requires_grad
    only = mamba_chunk_scan_combined(
        **tensors, **case.options(), initial_states=initial_states, cu_seqlens=bounds, return_varlen_states=True,
        state_dtype=torch.bfloat16,
    )  # fmt: skip
    assert len(only) == 2
    assert torch.equal(only[1], found["varlen"].bfloat16())


def test_steps_behind_the_last_sequence_are_their_own(device):
    case = packed_case()
    tensors = case.inputs(torch.float32, device)
    short = bounds_of(LENGTHS)[:5].to(device)  # 199 of 301 steps
    out, states = mamba_chunk_scan_combined(
        **tensors, **case.options(), cu_seqlens=short, return_varlen_states=True
    )  # fmt: skip
    expected, expected_states = one_by_one({**tensors, "seq_idx": None}, case.options())
    torch.testing.assert_close(out[:, :199], expected[:, :199], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states[:4], rtol=1e-4, atol=1e-4)


def test_no_sequence_and_no_step(device):
    case = SsdCase(1, 0, 4, 8, initial_states=True)
    tensors = case.inputs(torch.float32, device)
    for bounds in ([0], [0, 0, 0]):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        _, states = mamba_chunk_scan_combined(
            **tensors, **case.options(), cu_seqlens=cu_seqlens, return_varlen_states=True
        )  # fmt: skip
        assert states.shape == (len(bounds) - 1, 4, 8, 16)
        if len(bounds) > 1:
            assert torch.equal(states[0], tensors["initial_states"][0])
            assert states[1].eq(0).all()


def test_a_sequence_does_not_see_nan_of_another():
    """On the CPU alone: tensor cores multiply what is masked by zero."""
    case = packed_case()
    tensors = case.inputs(torch.float32, "cpu")
    tensors["x"][0, 75] = float("nan")  # in the fourth sequence, 71 to 199
    bounds = bounds_of(LENGTHS)
    out, states = mamba_chunk_scan_combined(
        **tensors, **case.options(), cu_seqlens=bounds, return_varlen_states=True
    )  # fmt: skip
    assert out[0, :75].isfinite().all()
    assert out[0, 199:].isfinite().all()
    assert states.isfinite().flatten(1).all(1).tolist() == [i != 3 for i in range(len(LENGTHS))]


@pytest.mark.parametrize("bounds", [[0, 40, 20, 301], [0, 302], [-3, 301], [5, 301]], ids=str)
def test_bounds_that_do_not_rise_from_0(bounds):
    """The CPU looks at the values; on the GPU that would be a synchronisation."""
    tensors = packed_case().inputs(torch.float32, "cpu")
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    for states in (False, True):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most the 301 steps of x, got"):
            mamba_chunk_scan_combined(**tensors, chunk_size=64, cu_seqlens=cu_seqlens, return_varlen_states=states)
    rest = (tensors[name] for name in ("x", "dt", "A", "B", "C", "dt_bias", "initial_states"))
    if bounds[0] == 5:
        return  # the kernel could start anywhere
    with pytest.raises(ValueError, match="cu_seqlens must rise"):  # the library's own check
        torch.ops.mamba_ssm.ssd_varlen_states(*rest, cu_seqlens, True, 0.0, 1.0)
