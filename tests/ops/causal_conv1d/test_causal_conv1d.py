"""causal_conv1d_fn, causal_conv1d_update and causal_conv1d_varlen_states against their references."""

import functools
import itertools

import pytest
import torch
from _helpers.cases import CONV_CASES, DTYPES, ConvCase, assert_close_to_truth, case_id, dtype_id, outputs_and_gradients

from mamba_ssm.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    causal_conv1d_varlen_states,
    causal_conv1d_varlen_states_ref,
)

# On a GPU several segments of the length, the last of them a few steps.
SEGMENTS = (ConvCase(1, 16, 3080), ConvCase(1, 8, 4104))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CONV_CASES + SEGMENTS, ids=case_id)
def test_values_and_gradients(case, dtype, device):
    tensors = case.inputs(dtype, device)
    found = outputs_and_gradients(causal_conv1d_fn, tensors)
    plain = outputs_and_gradients(causal_conv1d_ref, tensors)
    truth = outputs_and_gradients(causal_conv1d_ref, tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)


REVERSED_CASES = (
    ConvCase(2, 16, 1030, initial_states=True, final_states=True),
    ConvCase(3, 5, 4096),
    ConvCase(2, 9, 777, width=3, silu=False),
    ConvCase(1, 6, 1030, seq_idx=True),
    ConvCase(1, 8, 1100, seq_idx=True, channel_last=True),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", CONV_CASES + REVERSED_CASES + SEGMENTS, ids=case_id)
def test_backwards_in_time(case, dtype, device):
    """Of flipped tensors, flipped back."""

    def by_flipping(**arguments):
        dims = {"x": 2, "seq_idx": 1, "initial_states": 2}
        flipped = {name: arguments[name].flip(dim) for name, dim in dims.items() if arguments[name] is not None}
        results = causal_conv1d_ref(**{**arguments, **flipped})
        return tuple(result.flip(2) for result in results) if isinstance(results, tuple) else results.flip(2)

    tensors = case.inputs(dtype, device)
    found = outputs_and_gradients(functools.partial(causal_conv1d_fn, reverse=True), tensors)
    plain = outputs_and_gradients(functools.partial(causal_conv1d_ref, reverse=True), tensors)
    assert_close_to_truth(found, plain, outputs_and_gradients(by_flipping, tensors, torch.float64))


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("seqlen", [1, 2, 7, 16, 255, 2041])
def test_backwards_in_rows_that_begin_anywhere(seqlen, first, device):
    """Rows that end at every place between multiples of 16 bytes, and whose neighbours must stay as they are."""
    wide = torch.randn(2, 3, seqlen + 24, dtype=torch.bfloat16).to(device)
    weight, bias = torch.randn(3, 4).to(device), torch.randn(3).to(device)
    x = wide[..., first : first + seqlen].requires_grad_()
    out = causal_conv1d_fn(x, weight, bias, activation="silu", reverse=True)
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    other = x.detach().flip(2).requires_grad_()
    expected = causal_conv1d_fn(other, weight, bias, activation="silu")
    (dother,) = torch.autograd.grad(expected.square().sum(), other)
    assert torch.equal(out, expected.flip(2))
    torch.testing.assert_close(dx, dother.flip(2))


CHANNEL_LAST_CASES = (
    ConvCase(2, 64, 130, channel_last=True),
    ConvCase(1, 128, 700, channel_last=True, bias=False),
    ConvCase(2, 16, 300, seq_idx=True, channel_last=True),
    ConvCase(2, 24, 90, initial_states=True, final_states=True, channel_last=True),
    ConvCase(3, 12, 40, width=3, silu=False, channel_last=True),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", CHANNEL_LAST_CASES, ids=case_id)
def test_gradients_whose_channels_are_neighbours_too(case, reverse, dtype, device):
    """As in a layer, whose next operator takes rows of channels: out's gradient has the layout of x."""

    def rows(function, **options):
        def call(**arguments):
            results = function(**arguments, **options)
            return (results[0].mT, results[1]) if isinstance(results, tuple) else results.mT

        return call

    tensors = case.inputs(dtype, device)
    found = outputs_and_gradients(rows(causal_conv1d_fn, reverse=reverse), tensors)
    plain = outputs_and_gradients(rows(causal_conv1d_ref, reverse=reverse), tensors)
    truth = outputs_and_gradients(rows(causal_conv1d_ref, reverse=reverse), tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)


def one_sequence_at_a_time(*, seq_idx, initial_states, reverse=False, **arguments):
    """The reference of each sequence alone: the one at the row's beginning goes on from the states, padding is zero."""
    x, rows = arguments.pop("x"), []
    for b in range(x.shape[0]):
        _, lengths = seq_idx[b].unique_consecutive(return_counts=True)
        bounds = [0, *lengths.cumsum(0).tolist()]
        begins = len(bounds) - 2 if reverse else 0
        parts = []
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            part, states = x[b : b + 1, :, start:end], initial_states[b : b + 1] if i == begins else None
            out = causal_conv1d_ref(part, initial_states=states, reverse=reverse, **arguments)
            parts.append(out if seq_idx[b, start] >= 0 else torch.zeros_like(out))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


PACKED_STATE_CASES = [
    ConvCase(5, 9, 61, seq_idx=True, initial_states=True),
    ConvCase(5, 8, 37, width=3, silu=False, bias=False, seq_idx=True, initial_states=True, channel_last=True),
    ConvCase(4, 16, 2, seq_idx=True, initial_states=True, channel_last=True),
    ConvCase(3, 7, 1, width=2, seq_idx=True, initial_states=True),
    ConvCase(3, 8, 272, seq_idx=True, initial_states=True),
    ConvCase(3, 5, 272, seq_idx=True, initial_states=True, channel_last=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", PACKED_STATE_CASES, ids=case_id)
def test_initial_states_are_of_the_sequence_at_the_beginning(case, reverse, dtype, device):
    """In a row that begins with padding they are of none: not even a NaN reaches a result, and their gradient is 0."""
    tensors = {**case.inputs(dtype, device), "reverse": reverse}
    del tensors["return_final_states"]
    seq_idx = tensors["seq_idx"]
    seq_idx[seq_idx % 4 == 2] = -1
    seq_idx[0] = 3  # one sequence
    first = slice(-5, None) if reverse else slice(0, 5)
    seq_idx[1, first], seq_idx[2, -1 if reverse else 0] = -7, 99  # padding; a sequence of one step
    hidden = {**tensors, "initial_states": tensors["initial_states"].clone()}
    hidden["initial_states"][1] = torch.nan
    found = outputs_and_gradients(causal_conv1d_fn, hidden)
    assert found["dinitial_states"][1].eq(0).all()
    assert found["dinitial_states"][0].ne(0).all() or case.seqlen < case.width - 1
    plain = outputs_and_gradients(causal_conv1d_ref, tensors)
    assert_close_to_truth(found, plain, outputs_and_gradients(one_sequence_at_a_time, tensors, torch.float64))


PADDED_CASES = [
    ConvCase(2, 24, 99, seq_idx=True),
    ConvCase(2, 8, 512, seq_idx=True),
    ConvCase(2, 5, 64, width=2, silu=False, seq_idx=True),
    ConvCase(1, 6, 1030, seq_idx=True),
    ConvCase(3, 13, 40, width=3, seq_idx=True, channel_last=True, bias=False),
    ConvCase(1, 8, 1100, silu=False, seq_idx=True, channel_last=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", PADDED_CASES, ids=case_id)
def test_a_negative_seq_idx_is_padding(case, strided, dtype, device):
    """Nothing that lies there counts, not even NaN, in x or in out's gradient."""
    tensors = case.inputs(dtype, device)
    seq_idx = tensors["seq_idx"]
    tensors["seq_idx"] = seq_idx = torch.where(seq_idx % 3 == 1, -seq_idx, seq_idx)
    seq_idx[:, -3:] = -1
    padding = (seq_idx < 0)[:, None]
    assert 3 < padding.sum() < padding.numel() - 3
    weights = torch.randn(tensors["x"].shape).to(device, dtype)

    def outputs(function, working, hole):
        x = tensors["x"].masked_fill(padding, hole).to(working)
        x = torch.stack([x, x], dim=-1)[..., 0] if strided and not case.channel_last else x
        leaves = {
            key: tensors[key].to(working).requires_grad_() for key in ("weight", "bias") if tensors[key] is not None
        }
        leaves["x"] = x.requires_grad_()
        out = function(**{**tensors, **leaves})
        grads = torch.autograd.grad(out, list(leaves.values()), weights.masked_fill(padding, hole).to(working))
        return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}

    found = outputs(causal_conv1d_fn, dtype, float("nan"))
    for name in ("out", "x"):
        assert found[name].masked_select(padding).eq(0).all(), name
    assert_close_to_truth(found, outputs(causal_conv1d_ref, dtype, 0.0), outputs(causal_conv1d_ref, torch.float64, 0.0))


@pytest.mark.parametrize("channel_last", [False, True])
def test_padding_is_zero_whatever_the_weight(channel_last, device):
    tensors = ConvCase(2, 8, 50, seq_idx=True, channel_last=channel_last).inputs(torch.float32, device)
    tensors["weight"][3] = torch.inf
    tensors["seq_idx"][:, 20:31] = -1
    x = tensors["x"].requires_grad_()
    out = causal_conv1d_fn(**tensors)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    for found in out, dx:
        assert found[:, :, 20:31].eq(0).all()
        assert found[:, :3].isfinite().all() and found[:, 4:].isfinite().all()


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=dtype_id)
def test_weights_of_another_dtype(weight_dtype, device):
    tensors = ConvCase(2, 8, 33).inputs(torch.bfloat16, device, weight_dtype)
    found = outputs_and_gradients(causal_conv1d_fn, tensors)
    assert found["out0"].dtype == torch.bfloat16
    assert found["dweight"].dtype == weight_dtype
    plain = outputs_and_gradients(causal_conv1d_ref, tensors)
    truth = outputs_and_gradients(causal_conv1d_ref, tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)


@pytest.mark.parametrize("channel_last", [False, True])
def test_output_keeps_the_memory_layout(channel_last, device):
    tensors = ConvCase(2, 8, 33, channel_last=channel_last).inputs(torch.float32, device)
    assert causal_conv1d_fn(**tensors).stride() == tensors["x"].stride()


def test_strides_of_a_slice(device):
    tensors = ConvCase(2, 8, 33, final_states=True, initial_states=True).inputs(torch.float32, device)
    expected, expected_states = causal_conv1d_fn(**tensors)
    for dim in (1, 2):
        x = torch.cat([tensors["x"], tensors["x"]], dim=dim).narrow(
            dim, tensors["x"].shape[dim], tensors["x"].shape[dim]
        )
        wide = torch.randn(2, 8, 3, 2, device=device)[..., 0].copy_(tensors["initial_states"])
        out, states = causal_conv1d_fn(**{**tensors, "x": x, "initial_states": wide})
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(states, expected_states)


def test_one_step_of_a_wider_row(device):
    """Whose stride, which is of no use then, is no multiple of a vector."""
    rows = torch.randn(1, 1, 67, device=device).to(torch.bfloat16)
    x = rows[..., :64].transpose(1, 2).requires_grad_()
    weight = torch.randn(64, 4, device=device).requires_grad_()
    out = causal_conv1d_fn(x, weight, activation="silu")
    dout = torch.randn(1, 1, 67, device=device).to(torch.bfloat16)[..., :64].transpose(1, 2)
    found = torch.autograd.grad(out, (x, weight), dout)
    expected = causal_conv1d_ref(x, weight, activation="silu")
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)  # one rounding to bfloat16
    truth = torch.autograd.grad(expected, (x, weight), dout)
    torch.testing.assert_close(found, truth, rtol=2e-2, atol=2e-2)


def test_final_states_out(device):
    tensors = ConvCase(2, 8, 33, final_states=True).inputs(torch.float32, device)
    target = torch.full((2, 3, 8), 7.0, device=device).transpose(1, 2)
    _, states = causal_conv1d_fn(**tensors, final_states_out=target)
    assert states.data_ptr() == target.data_ptr()
    assert torch.equal(target, tensors["x"][:, :, -3:])


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)], ids=["no_batch", "no_channels", "no_steps"])
def test_empty_sizes(shape, device):
    case = ConvCase(*shape, initial_states=True, final_states=True)
    found = outputs_and_gradients(causal_conv1d_fn, case.inputs(torch.float32, device))
    truth = outputs_and_gradients(causal_conv1d_ref, case.inputs(torch.float32, device))
    assert found["out0"].shape == shape
    for name, value in found.items():
        torch.testing.assert_close(value, truth.get(name, torch.zeros_like(value)))


def test_chunks_chained_through_the_state(device):
    tensors = ConvCase(2, 8, 50).inputs(torch.float32, device)
    whole = causal_conv1d_fn(**tensors)
    x, states, parts = tensors.pop("x"), None, []
    for part in (slice(0, 1), slice(1, 3), slice(3, 30), slice(30, 50)):
        out, states = causal_conv1d_fn(
            x[..., part], **{**tensors, "initial_states": states, "return_final_states": True}
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-6, atol=1e-6)


UPDATE_OPTIONS = [
    {},
    {"seqlen": 1},
    {"seqlen": 3},
    {"seqlen": 9},
    {"state_len": 7},
    {"width": 2, "state_len": 1},
    {"width": 3, "activation": None, "bias": False},
    {"circular": True, "state_len": 6},
    {"circular": True, "state_len": 5, "seqlen": 3},
    {"indices": True},
    {"indices": True, "circular": True, "state_len": 4, "seqlen": 2},
    {"state_len": 3, "seqlen": 0},
    # Pairs of channels at once on CUDA: an even dim, four taps, one step. "last": channels are neighbours in the state.
    {"dim": 70},
    {"dim": 70, "state_len": 3, "weight": None, "bias": False, "activation": None},
    {"dim": 70, "layout": "last", "weight": None, "indices": True},
    {"dim": 70, "layout": "last", "state_len": 3},
    {"dim": 70, "indices": True, "state_len": 3, "seqlen": 1},
    {"dim": 70, "layout": "odd"},
    {"batch": 7, "dim": 128 * 1024, "indices": True},
    {"batch": 5, "dim": 128 * 1024, "layout": "last", "state_len": 3},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", UPDATE_OPTIONS, ids=str)
def test_update(options, dtype, device):
    batch, dim, width = options.get("batch", 3), options.get("dim", 37), options.get("width", 4)
    seqlen, state_len = options.get("seqlen"), options.get("state_len", 4)
    rows = batch + 5 if options.get("indices") else batch
    parameters = options.get("weight", torch.float32) or dtype
    x = torch.randn(batch, dim, *([] if seqlen is None else [seqlen])).to(dtype)
    state = torch.randn(rows, dim, state_len).to(device, dtype)
    if options.get("layout") == "last":
        state = state.mT.contiguous().mT
    if options.get("layout") == "odd":  # rows that begin at any address
        x = torch.cat([x, x[:, :1]], dim=1)[:, 1:]
    arguments = {
        "x": x.to(device),
        "weight": torch.randn(dim, width).to(device, parameters),
        "bias": torch.randn(dim).to(device, parameters) if options.get("bias", True) else None,
        "activation": options.get("activation", "silu"),
        "cache_seqlens": torch.tensor([2, 11, 5], dtype=torch.int32, device=device)
        if options.get("circular")
        else None,
        "conv_state_indices": torch.tensor([5, -1, *range(2, batch)], dtype=torch.int32, device=device)
        if options.get("indices")
        else None,
    }
    if options.get("indices"):
        arguments["conv_state_indices"][5:6] = rows - 1  # in place of 5, which is named
    results = {}
    for name, function, working in (
        ("found", causal_conv1d_update, dtype),
        ("plain", causal_conv1d_update_ref, dtype),
        ("truth", causal_conv1d_update_ref, torch.float64),
    ):
        copy = state.clone().to(working)  # keeps the layout
        converted = {
            key: value.to(working)
            if key in ("x", "weight", "bias") and value is not None and working != dtype
            else value
            for key, value in arguments.items()
        }
        results[name] = {"out": function(conv_state=copy, **converted), "state": copy}
    assert results["found"]["out"].shape == x.shape
    assert_close_to_truth(**results)


def test_update_steps_equal_one_convolution(device):
    tensors = ConvCase(2, 8, 20).inputs(torch.float32, device)
    whole = causal_conv1d_fn(**tensors)
    state = torch.zeros(2, 8, 4, device=device)
    steps = [
        causal_conv1d_update(tensors["x"][..., t], state, tensors["weight"], tensors["bias"], "silu") for t in range(20)
    ]
    torch.testing.assert_close(torch.stack(steps, dim=2), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state_len", [1, 3, 6])
def test_varlen_states(state_len, device):
    x = torch.randn(17, 5, device=device)
    bounds = torch.tensor([0, 4, 5, 5, 17], dtype=torch.int32, device=device)
    found = causal_conv1d_varlen_states(x, bounds, state_len)
    assert torch.equal(found, causal_conv1d_varlen_states_ref(x, bounds, state_len))
    assert found.shape == (4, 5, state_len)


@pytest.mark.parametrize("bounds", [[0, 4, 5, 5, 17], [0, 0]], ids=str)
def test_gradient_of_varlen_states(bounds):
    """Of no steps at all too: zeros that belong to the graph, as those of a short sequence do."""
    x = torch.randn(bounds[-1], 5, dtype=torch.float64, requires_grad=True)
    assert causal_conv1d_varlen_states(x, torch.tensor(bounds), 3).requires_grad
    torch.autograd.gradcheck(lambda x: causal_conv1d_varlen_states(x, torch.tensor(bounds), 3), x)


def test_varlen_states_of_wrong_arguments():
    x, bounds = torch.randn(17, 5), torch.tensor([0, 4, 17])
    for arguments, error, message in (
        ((x[0], bounds, 3), ValueError, "x must have 2 dimensions"),
        ((x, bounds.float(), 3), TypeError, "cu_seqlens must be int32 or int64, got float32"),
        ((x, bounds.to("meta"), 3), ValueError, "cu_seqlens must be on cpu like x, got meta"),
        ((x, bounds[:0], 3), ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\), got \(0,\)"),
        ((x, bounds + 1, 3), ValueError, r"cu_seqlens must rise from 0 to at most the 17 steps of x, got \[1, 5, 18\]"),
        ((x, bounds.flip(0), 3), ValueError, "cu_seqlens must rise from 0"),
        ((x, bounds, -1), ValueError, r"state_len must be at least 0 and less than 2\*\*31, got -1"),
        ((x, bounds, 1.5), TypeError, "state_len must be an integer, got 1.5"),
        ((x, bounds.to_sparse(), 3), TypeError, r"cu_seqlens must be a dense tensor, got torch\.sparse_coo"),
        ((x, None, 3), TypeError, r"cu_seqlens must be a torch\.Tensor, got NoneType"),
    ):
        with pytest.raises(error, match=message):
            causal_conv1d_varlen_states(*arguments)
