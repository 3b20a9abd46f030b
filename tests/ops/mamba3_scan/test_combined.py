"""Mamba-3's scan and the pieces of its step under upstream's names: layouts, results in the dtypes that came in."""

import math

import pytest
import torch
from _helpers.mamba3_cases import STATES, Mamba3Case

from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
from mamba_ssm.ops.mamba3_scan import States, mamba3_scan, mamba3_scan_ref, mamba3_step
from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo import mamba3_mimo
from mamba_ssm.ops.triton.mamba3.angle_dt import angle_dt_fwd
from mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import apply_rotary_qk_inference_fwd
from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined
from mamba_ssm.ops.triton.mamba3.mamba3_siso_step import mamba3_siso_step

SISO = Mamba3Case(2, 40, 4, 8, groups=2, angles_of_heads=True, states=True)
MIMO = Mamba3Case(1, 40, 4, 8, rank=3, angles_of_heads=True, norm=True, cu_seqlens=(0, 13, 40))


def siso_arguments(tensors):
    """mamba3_scan's tensors as mamba3_siso_combined's."""
    tensors = dict(tensors)
    angle, ssm, k, v = (tensors.pop(name) for name in STATES)
    for name in ("ADT", "DT", "Trap"):
        tensors[name] = tensors[name].transpose(1, 2)
    for name in ("Q", "K"):
        tensors[name] = tensors[name].squeeze(2)
    for name in ("Q_bias", "K_bias"):
        tensors[name] = tensors[name].squeeze(1)
    wanted = {key: value for key, value in tensors.items() if value is not None}
    return {**wanted, "Input_States": (angle, ssm, k.squeeze(1), v)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_siso(dtype, device):
    tensors = SISO.inputs(dtype, device)
    out, *states = SISO.run(mamba3_scan)(**tensors)
    found = mamba3_siso_combined(**siso_arguments(tensors), chunk_size=32, return_final_states=True)
    assert [result.dtype for result in found] == [dtype, *[torch.float32] * 3, dtype]
    expected = [out.squeeze(2), states[0], states[1], states[2].squeeze(1), states[3].to(dtype)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(mamba3_siso_combined(**siso_arguments(tensors)), found[0])


def test_siso_step(device):
    tensors = SISO.inputs(torch.float32, device)
    whole = siso_arguments(tensors)
    expected, *finals = mamba3_siso_combined(**whole, return_final_states=True)
    states = whole.pop("Input_States")
    for t in range(40):
        in_time = {name: whole[name][:, t] for name in ("Q", "K", "V", "Angles", "Z")}
        by_head = {name: whole[name][..., t] for name in ("ADT", "DT", "Trap")}
        out, states = mamba3_siso_step(**{**whole, **in_time, **by_head}, Input_States=states)
        torch.testing.assert_close(out, expected[:, t], rtol=1e-4, atol=1e-4)
    for state, final in list(zip(states, finals, strict=True))[1:]:
        torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="Input_States must be the four states before the step, got None"):
        mamba3_siso_step(**{**whole, **in_time, **by_head})


def test_mimo(device):
    tensors = MIMO.inputs(torch.bfloat16, device)
    out, *states = MIMO.run(mamba3_scan)(**tensors)
    arguments = {name: value for name, value in tensors.items() if name not in ("norm_weight", "seq_idx")}
    for name in ("ADT", "DT", "Trap"):
        arguments[name] = arguments[name].transpose(1, 2)
    options = {"chunk_size": 16, "rotary_dim_divisor": 4, "dtype": torch.bfloat16, "return_state": True}
    norm = {"fuse_pregate_headwise_rms_norm": True, "outproj_norm_weight": tensors["norm_weight"].flatten()}
    found = mamba3_mimo(**arguments, **options, **norm)
    for ours, theirs in zip(found, (out, *states[:3], states[3].bfloat16()), strict=True):
        assert torch.equal(ours, theirs)
    assert found[4].shape == (2, 4, 8)
    arguments["MIMO_Out"] = None
    assert mamba3_mimo(**arguments, **options)[0].shape == (1, 40, 3, 4, 8)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_step_of_pieces(rank, device):
    """Rotation and step one by one are the step of mamba3_step."""
    case = Mamba3Case(2, 1, 4, 8, rank=rank, groups=4, angles_of_heads=True, states=True)
    tensors = case.inputs(torch.float32, device)
    states = [tensors.pop(name) for name in STATES]
    one = {name: value for name, value in tensors.items() if value is not None}
    for name in ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z"):
        one[name] = one[name].squeeze(1)
    updated = States(*(state.clone() for state in states))
    expected = mamba3_step(updated, **one, pairwise=rank == 0)
    biases = {"bias_q": one["Q_bias"].transpose(0, 1), "bias_k": one["K_bias"].transpose(0, 1)}
    steps = states[0], one["Angles"], one["DT"]
    q, k, angle = apply_rotary_qk_inference_fwd(one["Q"], one["K"], *steps, **biases, rotate_pairwise=rank == 0)
    torch.testing.assert_close(torch.remainder(angle, 2 * math.pi), updated.angle, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, updated.k, rtol=1e-5, atol=1e-5)
    ones = torch.ones(4, max(rank, 1), 8, device=device)
    xproj, zproj, outproj = (one.get(name, ones).transpose(0, 1) for name in ("MIMO_V", "MIMO_Z", "MIMO_Out"))
    state, out = states[1].clone(), torch.empty_like(one["V"])
    rates = one["ADT"] / one["DT"]
    arguments = (states[2], states[3], rates, k, q, one["D"], one["V"], one["DT"], torch.sigmoid(one["Trap"]), xproj)
    mamba3_step_fn(state, *arguments, outproj, out=out, z=one["Z"], zproj=zproj)
    torch.testing.assert_close(out, expected if rank else expected.squeeze(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, updated.ssm, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"out must be given, of shape \(2, [13], 4, 8\), got None"):
        mamba3_step_fn(state, *arguments)
    back = apply_rotary_qk_inference_fwd(q, k, *steps, conjugate=True, rotate_pairwise=rank == 0)
    torch.testing.assert_close(back[0], one["Q"] + biases["bias_q"], rtol=1e-4, atol=1e-4)
    mine = [tensor.clone() for tensor in (one["Q"], one["K"], states[0])]
    results = apply_rotary_qk_inference_fwd(
        *mine, one["Angles"], one["DT"], **biases, inplace=True, rotate_pairwise=rank == 0
    )
    assert all(result is tensor for result, tensor in zip(results, mine, strict=True))
    assert torch.equal(mine[0], q) and torch.equal(mine[2], angle)


def test_angles(device):
    case = Mamba3Case(1, 150, 2, 4, dstate=8, angles_of_heads=True, cu_seqlens=(0, 70, 70, 140), states=True)
    tensors = case.inputs(torch.float32, device)
    arguments = tensors["Angles"], tensors["DT"].transpose(1, 2), tensors["angle_state"]
    out, ends = angle_dt_fwd(*arguments, return_output_state=True, cu_seqlens=tensors["cu_seqlens"])
    expected = case.run(mamba3_scan_ref)(**tensors)[1]
    for function in (torch.cos, torch.sin):
        torch.testing.assert_close(function(ends), function(expected), rtol=0, atol=1e-5)
    assert torch.equal(out[:, 139], ends[2:]) and not out[:, 140:].any()
    assert torch.equal(angle_dt_fwd(*arguments, cu_seqlens=tensors["cu_seqlens"]), out)


def test_dtypes_of_their_own(device):
    """As upstream takes them: a norm's output wider than values, a gate narrower."""
    for case, function in (SISO, mamba3_siso_combined), (MIMO, mamba3_mimo):
        tensors = case.inputs(torch.float32, device)
        if case is SISO:
            given, more = siso_arguments(tensors), {}
        else:
            given = {name: value for name, value in tensors.items() if name not in ("norm_weight", "seq_idx")}
            given.update({name: given[name].transpose(1, 2) for name in ("ADT", "DT", "Trap")})
            more = {"chunk_size": 16, "rotary_dim_divisor": 4, "dtype": None}
        given["V"] = given["V"].bfloat16()
        mixed = function(**given, **more)
        same = function(**{**given, **{name: given[name].bfloat16() for name in ("Q", "K", "Z")}}, **more)
        assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, same)


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"Input_States": (None,) * 3}, ValueError, "Input_States must be four tensors or None, got 3"),
        ({"Input_States": (None,) * 4}, TypeError, r"Input_States\[2\] must be a torch.Tensor, got NoneType"),
        ({"Q_bias": torch.zeros(4, 1, 16)}, ValueError, r"Q_bias must have 2 dimensions \(H, N\), got shape"),
        ({"Trap": None}, TypeError, "Trap must be a torch.Tensor, got NoneType"),
    ],
    ids=str,
)
def test_wrong_arguments_of_siso(change, error, message):
    with pytest.raises(error, match="mamba3_siso_combined: " + message):
        mamba3_siso_combined(**{**siso_arguments(SISO.inputs(torch.float32, "cpu")), **change})


def test_wrong_arguments_of_pieces():
    """Nothing is broadcast, and nothing is written before all is known to fit."""
    row, value, head, projection = (2, 3, 4, 8), (2, 4, 6), (2, 4), (3, 4, 6)
    shapes = [row, value, head, row, row, (4,), value, head, head, projection]
    names = ["Bstate", "Xstate", "A", "B", "C", "D", "x", "dt", "trap", "xproj"]
    given = {name: torch.ones(shape) for name, shape in zip(names, shapes, strict=True)}
    given.update(state=torch.zeros(2, 4, 6, 8), out=torch.zeros(2, 3, 4, 6))
    for name, wrong in (("B", torch.ones(2, 3, 1, 8)), ("D", torch.ones(1)), ("state_out", torch.zeros(2, 4, 6, 7))):
        with pytest.raises(ValueError, match=f"mamba3_step_fn: {name} must have shape"):
            mamba3_step_fn(**{**given, name: wrong})
    with pytest.raises(TypeError, match=r"mamba3_step_fn: D must be a torch\.Tensor, got NoneType"):
        mamba3_step_fn(**{**given, "D": None})
    assert not given["out"].any() and not given["state"].any()
    q, angles = torch.ones(row), torch.ones(2, 4, 2)
    with pytest.raises(ValueError, match=r"bias_q must have shape \(R, H, N\) = \(3, 4, 8\), got \(4, 3, 8\)"):
        apply_rotary_qk_inference_fwd(q, q, angles, angles, torch.ones(head), torch.ones(4, 3, 8))
    packed, bounds = torch.ones(1, 9, 4, 2), torch.tensor([0, 4, 9])
    with pytest.raises(ValueError, match=r"init_state must have shape \(U, H, S\) = \(2, 4, 2\), got \(3, 4, 2\)"):
        angle_dt_fwd(packed, torch.ones(1, 4, 9), torch.ones(3, 4, 2), cu_seqlens=bounds)
    with pytest.raises(ValueError, match="cu_seqlens is for sequences packed in one row, got a batch of 2"):
        angle_dt_fwd(packed.expand(2, -1, -1, -1), torch.ones(2, 4, 9), cu_seqlens=bounds)
