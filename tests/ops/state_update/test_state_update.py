"""selective_state_update against its reference, and against the scan step by step."""

import pytest
import torch
from _helpers.cases import DTYPES, ScanCase, assert_close_to_truth, dtype_id

from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update, selective_state_update_ref

OPTIONS = [
    {},
    {"dim": 1, "dstate": 1},
    {"dim": 37, "dstate": 5, "z": False},
    {"dstate": 128, "D": False},
    {"dstate": 256, "dt_bias": False},
    {"softplus": False},
    {"indices": True},
    {"heads": 4, "groups": 2},
    {"heads": 6, "groups": 1, "dim": 8, "dstate": 64},
    {"heads": 4, "groups": 4, "tied": True},
    {"heads": 4, "groups": 1, "indices": True, "tied": True, "dim": 64},
    {"heads": 2, "groups": 1, "tied": True, "dim": 40, "dstate": 64},  # on the CPU pairs of rows, and some alone
    # a GPU's warp takes several batch entries
    {"batch": 4500, "dim": 32},
    {"batch": 1100, "heads": 2, "groups": 1, "indices": True, "tied": True, "dim": 8, "dstate": 128},
    # blocks have eight warps, the last one fewer
    {"batch": 1, "dim": 67680},
]


def inputs(options, dtype, state_dtype, device):
    batch, dim, dstate = options.get("batch", 3), options.get("dim", 20), options.get("dstate", 16)
    heads, groups = options.get("heads"), options.get("groups")
    rows = batch + 4 if options.get("indices") else batch
    channels = (heads, dim) if heads else (dim,)
    matrix = (batch, groups, dstate) if heads else (batch, dstate)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape).to(device, dtype)

    if options.get("tied"):  # as Mamba-2 calls it: one A, dt, bias and D a head
        A = (-torch.rand(heads, 1, 1)).to(device).expand(heads, dim, dstate)
        dt = normal(batch, heads, 1).expand(batch, heads, dim)
        dt_bias, D = (normal(heads, 1, dtype=torch.float32).expand(heads, dim) for _ in range(2))
    else:
        A, dt = -torch.rand(*channels, dstate).to(device), normal(batch, *channels)
        dt_bias, D = (normal(*channels, dtype=torch.float32) for _ in range(2))
    return {
        "state": normal(rows, *channels, dstate, dtype=state_dtype),
        "x": normal(batch, *channels),
        "dt": dt,
        "A": A,
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": D if options.get("D", True) else None,
        "z": normal(batch, *channels) if options.get("z", True) else None,
        "dt_bias": dt_bias if options.get("dt_bias", True) else None,
        "dt_softplus": options.get("softplus", True),
        "state_batch_indices": cache_rows(batch, rows).to(device) if options.get("indices") else None,
    }


def cache_rows(batch, rows):
    indices = torch.randperm(rows, dtype=torch.int32)[:batch]
    indices[1::7] = -1  # padding
    return indices


def run(function, arguments, dtype=None):
    arguments = {
        name: value.to(dtype) if dtype and isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    arguments["state"] = arguments["state"].clone()
    return {"out": function(**arguments), "state": arguments["state"]}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: "state_" + dtype_id(dtype))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_reference(options, state_dtype, dtype, device):
    arguments = inputs(options, dtype, state_dtype, device)
    found = run(selective_state_update, arguments)
    assert found["out"].dtype == dtype
    assert found["state"].dtype == state_dtype
    plain = run(selective_state_update_ref, arguments)
    assert_close_to_truth(found, plain, run(selective_state_update_ref, arguments, torch.float64))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: "state_" + dtype_id(dtype))
def test_more_heads_than_a_gpu_takes_at_once(state_dtype, device):
    """Blocks of eight warps, which take several batch entries."""
    options = {"batch": 64, "heads": 24, "groups": 1, "tied": True, "dim": 64, "dstate": 128}
    arguments = inputs(options, torch.bfloat16, state_dtype, device)
    found, plain = run(selective_state_update, arguments), run(selective_state_update_ref, arguments)
    assert_close_to_truth(found, plain, run(selective_state_update_ref, arguments, torch.float64))


def test_strided_views(device):
    arguments = inputs({"heads": 4, "groups": 2}, torch.float32, torch.float32, device)
    expected = run(selective_state_update, arguments)
    strided = dict(arguments)
    for name in ("x", "dt", "z", "B", "C"):
        strided[name] = torch.stack([arguments[name], arguments[name]], dim=-1)[..., 0]
    strided["state"] = arguments["state"].transpose(1, 2).contiguous().transpose(1, 2)
    found = run(selective_state_update, strided)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_states_that_are_no_numbers(dtype, device):
    """NaN of any bits stays NaN, infinity stays infinity, and other states stay what they are."""
    arguments = inputs({"heads": 1, "groups": 1, "tied": True, "dim": 16, "dstate": 64}, dtype, dtype, device)
    bits = {4: (torch.int32, [-1, 2**31 - 1, 0x7F800001]), 2: (torch.int16, [-1, 2**15 - 1, 0x7F81])}
    integers, patterns = bits[dtype.itemsize]
    state = arguments["state"]
    state[0, 0, :9, :3] = torch.tensor(patterns, dtype=integers).view(dtype).to(device)
    state[0, 0, 3, 30:32] = torch.tensor([float("inf"), -float("inf")], device=device)
    found, expected = run(selective_state_update, arguments), run(selective_state_update_ref, arguments)
    assert torch.equal(found["state"].isnan(), expected["state"].isnan())
    assert torch.equal(found["state"].isinf(), expected["state"].isinf())
    assert torch.equal(found["out"].isnan(), expected["out"].isnan())


def test_infinite_x_without_D(device):
    """An absent D does nothing: 0 times infinity would be NaN."""
    arguments = inputs({"D": False, "z": False}, torch.float32, torch.float32, device)
    arguments["x"][0, 0] = float("inf")
    arguments["C"].abs_()
    arguments["B"].abs_()
    assert run(selective_state_update, arguments)["out"][0, 0] == float("inf")


def test_steps_equal_the_scan(device):
    case = ScanCase(2, 9, 30)
    tensors = case.inputs(torch.float32, device)
    out, last_state = selective_scan_fn(**tensors, delta_softplus=True, return_last_state=True)
    state = torch.zeros_like(last_state)
    steps = []
    for t in range(30):
        u, delta, z = (tensors[name][..., t] for name in ("u", "delta", "z"))
        B, C = (tensors[name][:, 0, :, t] for name in ("B", "C"))
        D, bias = tensors["D"], tensors["delta_bias"]
        steps.append(selective_state_update(state, u, delta, tensors["A"], B, C, D, z, bias, True))
    torch.testing.assert_close(torch.stack(steps, dim=2), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last_state, rtol=1e-4, atol=1e-4)
