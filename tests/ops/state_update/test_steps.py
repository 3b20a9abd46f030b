"""selective_state_update of several steps, with states that move to other rows, and with copies of states between."""

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id

from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref

F32 = torch.float32
SIZES = [  # steps, heads (0: none), headdim, dstate
    (1, 4, 8, 16),
    (2, 0, 37, 16),
    (3, 3, 7, 5),
    (4, 4, 64, 128),
    (16, 0, 20, 8),
    (5, 2, 12, 256),
]
OPTIONS = [{}, {"tied": True}, {"dst": True}, {"buffer": True, "z": False}, {"dst": True, "buffer": True, "D": False}]


def inputs(sizes, options, dtype, state_dtype, device):
    steps, heads, dim, dstate = sizes
    batch, rows = 3, 7 if options.get("dst") else 3
    channels = (heads, dim) if heads else (dim,)
    matrix = (batch, steps, 2 if heads % 2 == 0 else 1, dstate) if heads else (batch, steps, dstate)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape).to(device, dtype)

    A, dt = -torch.rand(*channels, dstate).to(device), normal(batch, steps, *channels)
    if options.get("tied"):  # one A and one dt a head
        A, dt = A[..., :1, :1].expand_as(A), dt[..., :1].expand_as(dt)
    tensors = {
        "state": normal(rows, *channels, dstate, dtype=state_dtype),
        "x": normal(batch, steps, *channels),
        "dt": dt,
        "A": A,
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": normal(*channels, dtype=F32) if options.get("D", True) else None,
        "z": normal(batch, steps, *channels) if options.get("z", True) else None,
        "dt_bias": normal(*channels, dtype=F32),
        "dt_softplus": True,
    }
    if options.get("dst"):  # the second is padding, the state of the third is dropped
        tensors["state_batch_indices"] = torch.tensor([4, -1, 4], device=device)
        tensors["dst_state_batch_indices"] = torch.tensor([1, 2, -1], dtype=torch.int32, device=device)
    if options.get("buffer"):
        tensors["intermediate_states_buffer"] = normal(batch, steps, *channels, dstate, dtype=state_dtype)
    return tensors


def run(function, arguments, dtype=None):
    """What the call returns and all that it writes."""
    arguments = {
        name: value.to(dtype) if dtype and isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    written = {name: arguments[name].clone() for name in ("state", "intermediate_states_buffer") if name in arguments}
    return {"out": function(**{**arguments, **written}), **written}


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: "state_" + dtype_id(dtype))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_reference(sizes, options, state_dtype, dtype, device):
    arguments = inputs(sizes, options, dtype, state_dtype, device)
    plain = run(selective_state_update_ref, arguments)
    truth = run(selective_state_update_ref, arguments, torch.float64)
    assert_close_to_truth(run(selective_state_update, arguments), plain, truth)


def test_equals_single_steps(device):
    arguments = inputs((6, 2, 12, 16), {"buffer": True}, F32, F32, device)
    state, copies = arguments["state"].clone(), arguments.pop("intermediate_states_buffer")
    out = selective_state_update(**arguments, intermediate_states_buffer=copies)
    per_step = ("x", "dt", "B", "C", "z")
    for t in range(6):
        step = {name: tensor[:, t] if name in per_step else tensor for name, tensor in arguments.items()}
        torch.testing.assert_close(out[:, t], selective_state_update(**{**step, "state": state}), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(copies[:, t], state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(arguments["state"], state, rtol=1e-5, atol=1e-5)


def test_strided_views(device):
    arguments = inputs((4, 4, 8, 16), {"dst": True, "buffer": True}, F32, F32, device)
    expected = run(selective_state_update, arguments)
    strided = dict(arguments)
    for name in ("x", "dt", "z", "B", "C"):  # time first in memory
        strided[name] = arguments[name].transpose(0, 1).contiguous().transpose(0, 1)
    copies = arguments["intermediate_states_buffer"].transpose(1, 3).contiguous().transpose(1, 3)
    state = arguments["state"].clone()
    out = selective_state_update(**{**strided, "state": state, "intermediate_states_buffer": copies})
    torch.testing.assert_close({"out": out, "state": state, "intermediate_states_buffer": copies}, expected)


def test_one_step_into_another_row(device):
    """Without a dimension of steps; the old state stays, and several entries may read it."""
    arguments = inputs((1, 4, 8, 16), {"dst": True}, F32, F32, device)
    single = {name: t[:, 0] if name in ("x", "dt", "B", "C", "z") else t for name, t in arguments.items()}
    expected, found = run(selective_state_update, arguments), run(selective_state_update, single)
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    torch.testing.assert_close(found["out"], expected["out"][:, 0], rtol=0, atol=0)
    assert torch.equal(found["state"][4], arguments["state"][4])
    assert not torch.equal(found["state"][1], arguments["state"][1])


def test_a_row_beyond_the_cache(device):
    arguments = inputs((2, 0, 8, 4), {"dst": True}, F32, F32, device)
    arguments["dst_state_batch_indices"] = torch.tensor([7, 2, 1], device=device)
    state = arguments["state"].clone()
    if device == "cpu":
        with pytest.raises(ValueError, match=r"dst_state_batch_indices must be less than .*, 7, got 7"):
            selective_state_update(**arguments)
        assert torch.equal(arguments["state"], state)
        return
    out = selective_state_update(**arguments)  # the values cannot be looked at
    assert out[0].isnan().all()
    assert not out[1].any()
    assert out[2].isfinite().all()
    assert torch.equal(arguments["state"][[0, 2, 3, 4, 5, 6]], state[[0, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"x": torch.zeros(3, 0, 8)},
            ValueError,
            r"x must have at least one step T of \(B, T, D\), got shape \(3, 0, 8\)",
        ),
        ({"dt": torch.zeros(3, 1, 8)}, ValueError, r"dt must have shape \(B, T, D\) = \(3, 2, 8\), got \(3, 1, 8\)"),
        ({"B": torch.zeros(3, 4)}, ValueError, r"B must have shape \(B, T, N\) = \(3, 2, 4\), got \(3, 4\)"),
        (
            {"dst_state_batch_indices": torch.tensor([1, 2])},
            ValueError,
            r"dst_state_batch_indices must have shape \(B,\)",
        ),
        ({"dst_state_batch_indices": torch.zeros(3)}, TypeError, "dst_state_batch_indices must be int32 or int64"),
        ({"dst_state_batch_indices": torch.tensor([1, 1, 2])}, ValueError, "must not name a row twice, got 1"),
        (
            {"state_batch_indices": torch.tensor([1, 2, 3]), "dst_state_batch_indices": torch.tensor([2, 5, 6])},
            ValueError,
            "dst_state_batch_indices must not name a row that another entry reads, got 2 for entry 0",
        ),
        (
            {"intermediate_states_buffer": torch.zeros(3, 1, 8, 4)},
            ValueError,
            r"intermediate_states_buffer must have shape \(B, T, D, N\) = \(3, 2, 8, 4\), got \(3, 1, 8, 4\)",
        ),
        (
            {"intermediate_states_buffer": torch.zeros(3, 2, 8, 4).half()},
            TypeError,
            "intermediate_states_buffer must have the dtype of state, float32, got float16",
        ),
        (
            {"intermediate_states_buffer": torch.zeros(3, 1, 8, 4).expand(3, 2, 8, 4)},
            ValueError,
            "intermediate_states_buffer is written in place, but its elements share memory",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(changes, error, words):
    arguments = inputs((2, 0, 8, 4), {"dst": True}, F32, F32, "cpu")
    with pytest.raises(error, match=f"selective_state_update: .*{words}"):
        selective_state_update(**{**arguments, **changes})


def test_what_is_written_is_known_to_autograd_and_meta(device):
    arguments = inputs((2, 0, 8, 4), {"dst": True, "buffer": True}, F32, F32, device)
    versions = [arguments[name]._version for name in ("state", "intermediate_states_buffer")]
    selective_state_update(**arguments)
    names = "state", "intermediate_states_buffer"
    assert all(arguments[name]._version > old for name, old in zip(names, versions, strict=True))
    meta = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    assert selective_state_update(**meta).shape == (3, 2, 8)


@pytest.mark.parametrize("buffer", [False, True])
def test_with_grad_mode_on(buffer, device):
    """A warning that names what was called, and a detached result, as of one step."""
    arguments = inputs((2, 0, 8, 4), {"dst": True, "buffer": buffer}, F32, F32, device)
    expected = run(selective_state_update, arguments)["out"]
    arguments["x"].requires_grad_()
    with pytest.warns(UserWarning, match="^selective_state_update writes in place"):
        out = selective_state_update(**arguments)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
