"""The parts of upstream's SISO kernels, put together as upstream does it: the scan, its states and all gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from _helpers.mamba3_cases import Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan_ref
from mamba_ssm.ops.triton.mamba3 import mamba3_siso_bwd
from mamba_ssm.ops.triton.mamba3.angle_dt import angle_dt_bwd, angle_dt_fwd
from mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd import mamba3_siso_fwd

CASES = {
    "whole": Mamba3Case(2, 21, 4, 6, groups=2, dstate=10, nangles=4),
    "states": Mamba3Case(2, 16, 2, 8, states=True, nangles=8),
    "plain": Mamba3Case(1, 9, 2, 4, D=False, Z=False, nangles=2),
    "packed": Mamba3Case(1, 25, 2, 8, cu_seqlens=(0, 9, 9, 10, 23), states=True),
    "one-step": Mamba3Case(1, 1, 1, 1, dstate=2, nangles=1, states=True),
}
CHUNK = 8


def in_upstreams_layout(tensors):
    """The inputs by name, and the last three states."""
    given = {name: tensors[name] for name in ("V", "Angles", "D", "Z", "cu_seqlens") if name in tensors}
    given |= {name: tensors[name].transpose(1, 2).contiguous() for name in ("ADT", "DT", "Trap")}
    given |= {name: tensors[name].squeeze(2) for name in ("Q", "K")}
    given |= {name: tensors[name].squeeze(1) for name in ("Q_bias", "K_bias")}
    if "ssm_state" not in tensors:
        return given, None
    return given, (tensors["ssm_state"], tensors["k_state"].squeeze(1), tensors["v_state"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_backward(case, device):
    """The gradients of the output and of all four final states, against float64, step by step."""
    torch.manual_seed(0)
    case = Mamba3Case(**{**vars(case), "angles_of_heads": True})
    tensors = case.inputs(torch.float32, device)
    exact = {
        name: value.double().requires_grad_() if value.is_floating_point() else value
        for name, value in tensors.items()
        if value is not None
    }
    absent = {name: None for name, value in tensors.items() if value is None}
    results = case.run(mamba3_scan_ref)(**exact, **absent)
    cotangents = [torch.randn_like(result) for result in results]
    names = [name for name, value in exact.items() if value.is_floating_point()]
    leaves = [exact[name] for name in names]
    expected = dict(zip(names, torch.autograd.grad(results, leaves, cotangents), strict=True))
    wanted, angle, ssm, k, v = results

    given, initial = in_upstreams_layout(tensors)
    bounds, D, Z = given.get("cu_seqlens"), given["D"], given["Z"]
    before = tensors.get("angle_state")
    summed, last_angle = angle_dt_fwd(
        given["Angles"], given["DT"], before, CHUNK, return_output_state=True, cu_seqlens=bounds
    )
    options = {"Initial_States": initial, "chunk_size": CHUNK, "return_final_states": True}
    arguments = {**given, "Angles": summed, **options}
    out, ungated, states, sums, totals, q, scaled, products, scale, gamma, finals = mamba3_siso_fwd(
        **arguments, store_states_adt_outv=True
    )
    found = out[:, :, None], torch.cos(last_angle), finals[0], finals[1][:, None], finals[2]
    for mine, other in zip(found, (wanted, torch.cos(angle), ssm, k, v), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-4)
    bare = mamba3_siso_fwd(**{**arguments, "return_final_states": False})
    assert bare[1:5] == (None,) * 4 and bare[10] is None and torch.equal(bare[0], out)

    dout, dangle, dssm, dk_state, dv_state = (cotangent.float() for cotangent in cotangents)
    backward, dz, dout = mamba3_siso_bwd, None, dout.squeeze(2)
    if Z is not None:
        dz, dout = backward.compute_dzdo(dout, Z, ungated)
    dq, dk, dv, dADT, dproducts, dD, dfirst = backward.compute_dqkv(
        q,
        scaled,
        given["V"],
        sums,
        totals,
        products,
        states,
        dout,
        dssm,
        dv_state,
        D,
        CHUNK,
        initial is not None,
        bounds,
    )
    inputs = given["Q"], given["K"], scale, gamma, given["Q_bias"], given["K_bias"], summed
    dQ, dK, dQ_bias, dK_bias, dsummed, dscale, dgamma = backward.compute_dqktheta(
        *inputs, dq, dk, dproducts, dk_state.squeeze(1), CHUNK, bounds
    )
    of_states = (dfirst, *initial[1:]) if initial is not None else (None,) * 3
    dDT, dTrap, dssm, dk, dv_before = backward.compute_ddt_dtrap_dinput_states(
        dscale, dgamma, given["DT"], given["Trap"], *of_states, bounds
    )
    dAngles, of_angles, dbefore = angle_dt_bwd(
        dsummed, given["Angles"], given["DT"], before is not None, CHUNK, dangle, bounds
    )
    grads = {
        "Q": dQ[:, :, None], "K": dK[:, :, None], "V": dv, "ADT": dADT.transpose(1, 2), "Z": dz, "D": dD,
        "DT": (dDT + of_angles).transpose(1, 2), "Trap": dTrap.transpose(1, 2), "Angles": dAngles,
        "Q_bias": dQ_bias[:, None], "K_bias": dK_bias[:, None],
        "angle_state": dbefore, "ssm_state": dssm, "k_state": None if dk is None else dk[:, None], "v_state": dv_before,
    }  # fmt: skip
    if bounds is not None:  # an empty sequence's last k and v are its initial ones, which these parts do not see
        for name in ("k_state", "v_state"):
            expected[name][1] = grads[name][1].double()
    for name, grad in grads.items():
        if name not in expected:
            assert grad is None, name
            continue
        scale_of = max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-3, atol=1e-4 * scale_of, msg=name)


def test_what_forward_stores(device):
    """By their definitions, of one head and two chunks."""
    torch.manual_seed(0)
    tensors = Mamba3Case(1, 6, 1, 3, dstate=4, nangles=2, angles_of_heads=True).inputs(torch.float32, device)
    given, _ = in_upstreams_layout(tensors)
    given["Angles"] = torch.zeros_like(given["Angles"])  # no rotation
    out, ungated, states, sums, totals, q, scaled, products, scale, gamma, _ = mamba3_siso_fwd(
        **given, chunk_size=4, store_states_adt_outv=True
    )
    share, dt, adt = torch.sigmoid(given["Trap"][0, 0]), given["DT"][0, 0], given["ADT"][0, 0]
    torch.testing.assert_close(gamma[0, 0], share * dt)
    torch.testing.assert_close(scale[0, 0], share * dt + F.pad((1 - share[1:]) * dt[1:], (0, 1)))
    biased = [(given[name] + given[f"{name}_bias"])[0, :, 0] for name in ("Q", "K")]
    torch.testing.assert_close(q[0, :, 0], biased[0])
    torch.testing.assert_close(scaled[0, :, 0], biased[1] * scale[0, 0, :, None])
    torch.testing.assert_close(products[0, 0], (biased[0] * biased[1]).sum(-1) * gamma[0, 0])
    chunks = torch.cat([adt[:4].cumsum(0), adt[4:].cumsum(0)]) / math.log(2)
    torch.testing.assert_close(sums[0, 0], chunks)
    torch.testing.assert_close(totals[0, 0], chunks[[3, 5]])
    decays = torch.exp(adt[:4].sum() - adt[:4].cumsum(0))
    state = torch.einsum("t,tp,tn->pn", decays, given["V"][0, :4, 0], scaled[0, :4, 0])
    torch.testing.assert_close(states[0, 0], torch.cat([torch.zeros_like(state), state], dim=1))
    torch.testing.assert_close(out, ungated * F.silu(given["Z"]))


def test_the_last_k_in_place(device):
    """apply_dk_state_post adds what compute_dqktheta gives for the state alone."""
    case = Mamba3Case(1, 9, 2, 4, dstate=6, nangles=3, angles_of_heads=True, cu_seqlens=(0, 4, 4, 8))
    given, _ = in_upstreams_layout(case.inputs(torch.float32, device))
    ones, state = torch.ones_like(given["DT"]), torch.randn(3, 2, 6, device=device)
    inputs = given["Q"], given["K"], ones, ones, given["Q_bias"], given["K_bias"], given["Angles"]
    nothing = torch.zeros(1, 9, 2, 6, device=device)
    bounds = given["cu_seqlens"]
    found = mamba3_siso_bwd.compute_dqktheta(*inputs, nothing, nothing, 0 * ones, state, 8, bounds)
    expected = found[1], found[3], found[4]
    totals = [torch.randn_like(gradient) for gradient in expected]
    before = [total.clone() for total in totals]
    mamba3_siso_bwd.apply_dk_state_post(state, given["Angles"], given["K"], given["K_bias"], *totals, bounds)
    for total, start, gradient in zip(totals, before, expected, strict=True):
        torch.testing.assert_close(total, start + gradient)
    assert found[0].eq(0).all() and expected[0][0, [3, 7]].ne(0).any() and expected[0][0, [0, 1, 8]].eq(0).all()


def test_halves_and_errors(device):
    tensors = Mamba3Case(2, 9, 2, 4, angles_of_heads=True).inputs(torch.bfloat16, device)
    given, _ = in_upstreams_layout(tensors)
    results = mamba3_siso_fwd(**given, store_states_adt_outv=True)
    kinds = [result.dtype for result in results[:-1]]
    assert kinds[:3] + kinds[5:7] == [torch.bfloat16] * 5
    assert kinds[3:5] + kinds[7:] == [torch.float32] * 5
    assert results[-1] is None
    with pytest.raises(ValueError, match="there must be a sequence, got a batch of 0"):
        mamba3_siso_fwd(**{**given, "V": given["V"][:0]})
    with pytest.raises(ValueError, match="d_issm_state needs input_k_state and input_v_state"):
        mamba3_siso_bwd.compute_ddt_dtrap_dinput_states(*(4 * [given["DT"]]), torch.zeros(2, 2, 4, 16, device=device))
    with pytest.raises(ValueError, match="compute_dzdo: z must have shape"):
        mamba3_siso_bwd.compute_dzdo(given["V"], given["V"][:, 1:], given["V"])
