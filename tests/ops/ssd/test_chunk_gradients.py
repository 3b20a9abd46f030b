"""The pieces of Mamba-2's backward, in upstream's layouts: each against autograd, and all of them as one backward."""

import pytest
import torch
from _helpers.cases import SsdCase, outputs_and_gradients

from mamba_ssm.ops.triton.ssd_bmm import _bmm_chunk_bwd, _bmm_chunk_fwd
from mamba_ssm.ops.triton.ssd_chunk_scan import (
    _chunk_scan_bwd_dC,
    _chunk_scan_bwd_dcb,
    _chunk_scan_bwd_ddAcs_prev,
    _chunk_scan_bwd_ddAcs_stable,
    _chunk_scan_bwd_ddAcs_stable_old,
    _chunk_scan_bwd_ddAcs_unstable,
    _chunk_scan_bwd_dstates,
    _chunk_scan_bwd_dx,
    _chunk_scan_bwd_dz,
    _chunk_scan_fwd,
    _chunk_scan_fwd_wip,
    chunk_scan,
)
from mamba_ssm.ops.triton.ssd_chunk_state import (
    _chunk_cumsum_bwd,
    _chunk_cumsum_fwd,
    _chunk_state_bwd_db,
    _chunk_state_bwd_ddAcs_stable,
    _chunk_state_bwd_dx,
    _chunk_state_fwd,
)
from mamba_ssm.ops.triton.ssd_combined import (
    _chunk_scan_chunk_state_bwd_dx,
    _mamba_chunk_scan_combined_bwd,
    _mamba_chunk_scan_combined_fwd,
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    selective_scan_bwd,
    ssd_chunk_scan_combined_ref,
    ssd_selective_scan,
)
from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_bwd, _state_passing_fwd

SIZE = 16  # of a chunk
# float32 sums of a few hundred terms in another order
close = {"rtol": 2e-4, "atol": 2e-4}


def suffix_sums(gradient):
    return gradient.flip(-1).cumsum(-1).flip(-1)


def inputs(seq_idx, z=True, dtype=torch.float32, device="cpu"):
    case = SsdCase(2, 41, 4, 6, dstate=5, groups=2, z=z, initial_states=True, seq_idx=seq_idx)
    tensors = case.inputs(dtype, device)
    if seq_idx:
        tensors["seq_idx"] = tensors["seq_idx"] - tensors["seq_idx"][:, :1]
    return tensors, {"dt_softplus": True, "dt_limit": (0.05, 0.9)}


def by_pieces(tensors, options, dout, dfinal):
    """Backward as upstream composes it, with each gradient of dA from the piece that has it."""
    t = tensors
    seq_idx, C, B, x, z, D = t["seq_idx"], t["C"], t["B"], t["x"], t["z"], t["D"]
    dA_cumsum, dt = _chunk_cumsum_fwd(t["dt"], t["A"], SIZE, t["dt_bias"], **options)
    CB = _bmm_chunk_fwd(C, B, SIZE, seq_idx=seq_idx, output_dtype=torch.float32)
    added = _chunk_state_fwd(B, x, dt, dA_cumsum, seq_idx=seq_idx)
    initial = t["initial_states"].flatten(-2)
    passed, _ = _state_passing_fwd(added.flatten(-2), dA_cumsum[..., -1], initial, seq_idx, SIZE)
    states = passed.view_as(added)
    _, out_x = _chunk_scan_fwd(CB, x, dt, dA_cumsum, C, states, D, z, seq_idx)

    dz, dout, dD, looking_back, out = _chunk_scan_bwd_dz(x, z, out_x, dout, SIZE, D=D, recompute_output=True)
    same, _ = _chunk_scan_bwd_ddAcs_unstable(x, dt, out_x, dout, dt, D, subtract_ddtdt=False)
    torch.testing.assert_close(looking_back, same)
    dstates = _chunk_scan_bwd_dstates(C, dA_cumsum, dout, seq_idx=seq_idx, dtype=torch.float32)
    dadded, dlast, dinitial = _state_passing_bwd(
        states.flatten(-2), dA_cumsum[..., -1], dstates.flatten(-2), dfinal.flatten(-2), seq_idx, True, chunk_size=SIZE
    )
    dadded = dadded.view_as(added)
    dx, ddt, also_dD = _chunk_scan_chunk_state_bwd_dx(x, dt, dA_cumsum, B, CB, dout, dadded, D, seq_idx)
    torch.testing.assert_close(also_dD, dD, **close)
    dB, ddA_states = _chunk_state_bwd_db(x, dt, dA_cumsum, dadded, seq_idx, B)
    dC, of_states = _chunk_scan_bwd_dC(states, dA_cumsum, dout, seq_idx, C)
    dCB, ddA_products = _chunk_scan_bwd_dcb(x, dt, dA_cumsum, dout, seq_idx, CB)
    dB = _bmm_chunk_bwd(C, dCB, residual=dB)
    dC = _bmm_chunk_bwd(B, dCB.transpose(-1, -2), residual=dC)
    of_states[..., -1] += dlast
    ddA = ddA_states + ddA_products + suffix_sums(of_states)
    ddt, dA, ddt_bias = _chunk_cumsum_bwd(ddA, ddt, t["dt"], t["A"], t["dt_bias"], **options)
    grads = {"x": dx, "dt": ddt, "A": dA, "B": dB, "C": dC, "D": dD, "z": dz, "dt_bias": ddt_bias}
    grads["initial_states"] = dinitial.view_as(t["initial_states"])
    return out, grads


@pytest.mark.parametrize("seq_idx", [False, True])
def test_all_pieces_make_the_backward(seq_idx):
    tensors, options = inputs(seq_idx)
    leaves = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in tensors.items()}
    out, final = mamba_chunk_scan(**leaves, chunk_size=SIZE, **options, return_final_states=True)
    dout, dfinal = torch.randn_like(out), torch.randn_like(final)
    names = [name for name, tensor in leaves.items() if tensor is not None and tensor.is_floating_point()]
    expected = torch.autograd.grad((out, final), [leaves[name] for name in names], (dout, dfinal))
    with torch.no_grad():
        found_out, found = by_pieces(tensors, options, dout, dfinal)
    torch.testing.assert_close(found_out, out, **close)
    assert set(found) == set(names)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, **close, msg=lambda text, name=name: f"{name}: {text}")


def test_pieces_that_give_a_part_or_the_same_in_another_way():
    tensors, options = inputs(False)
    x, B, C, D = (tensors[name] for name in ("x", "B", "C", "D"))
    dA_cumsum, dt = _chunk_cumsum_fwd(tensors["dt"], tensors["A"], SIZE, tensors["dt_bias"], **options)
    CB = _bmm_chunk_fwd(C, B, SIZE, output_dtype=torch.float32)
    states, dstates = torch.randn(2, 2, 3, 4, 6, 5)
    out, none = _chunk_scan_fwd(CB, x, dt, dA_cumsum, C, states, D)
    assert none is None
    torch.testing.assert_close(out, chunk_scan(B, C, x, dt, dA_cumsum, states, D), **close)
    assert torch.equal(out, _chunk_scan_fwd_wip(CB, x, dt, dA_cumsum, C, B, states, D)[0])
    dout = torch.randn_like(out)

    dcb, ddA = _chunk_scan_bwd_dcb(x, dt, dA_cumsum, dout, CB=CB)
    torch.testing.assert_close(_chunk_scan_bwd_dcb(x, dt, dA_cumsum, dout, ngroups=2), dcb)
    for same in (_chunk_scan_bwd_ddAcs_stable, _chunk_scan_bwd_ddAcs_stable_old):
        torch.testing.assert_close(same(x, dt, dA_cumsum, dout, CB), ddA)
    dC, of_states = _chunk_scan_bwd_dC(states, dA_cumsum, dout, C=C)
    torch.testing.assert_close(_chunk_scan_bwd_dC(states, dA_cumsum, dout, ngroups=2), dC)
    torch.testing.assert_close(_chunk_scan_bwd_ddAcs_prev(states, C, dout, dA_cumsum), of_states)
    dx, ddt = _chunk_scan_bwd_dx(CB, x, dt, dA_cumsum, dout, D)
    # the same sums as one difference
    ddA_cumsum, dD = _chunk_scan_bwd_ddAcs_unstable(x, dt, out, dout, ddt, D)
    torch.testing.assert_close(suffix_sums(ddA_cumsum), ddA + suffix_sums(of_states), **close)
    torch.testing.assert_close(dD, (x * dout).sum((0, 1)) if D.dim() == 2 else (x * dout).sum((0, 1, 3)), **close)

    of_state, ddt_state, ddA_state = _chunk_state_bwd_dx(B, x, dt, dA_cumsum, dstates)
    dB, steps = _chunk_state_bwd_db(x, dt, dA_cumsum, dstates, B=B)
    torch.testing.assert_close(suffix_sums(ddA_state), steps, **close)
    torch.testing.assert_close(_chunk_state_bwd_ddAcs_stable(B, x, dt, dA_cumsum, dstates), steps)
    torch.testing.assert_close(_chunk_state_bwd_db(x, dt, dA_cumsum, dstates, ngroups=2), dB)
    both, ddt_both, _ = _chunk_scan_chunk_state_bwd_dx(x, dt, dA_cumsum, B, CB, dout, dstates, D)
    torch.testing.assert_close(both, dx + of_state, **close)
    torch.testing.assert_close(ddt_both, ddt + ddt_state, **close)
    target = torch.empty_like(x)
    assert _chunk_state_bwd_dx(B, x, dt, dA_cumsum, dstates, dx=target)[0] is target and torch.equal(target, of_state)


def test_products_without_groups():
    a, b = torch.randn(2, 2, 41, 5)
    products = _bmm_chunk_fwd(a, b, SIZE, causal=True)
    assert products.shape == (2, 3, SIZE, SIZE)
    torch.testing.assert_close(products[:, 1], a[:, 16:32] @ b[:, 16:32].mT, **close)
    dout = torch.randn_like(products)
    leaf = b.clone().requires_grad_()
    (expected,) = torch.autograd.grad(_bmm_chunk_fwd_with_gradient(a, leaf), leaf, dout)
    torch.testing.assert_close(_bmm_chunk_bwd(a, dout, residual=b), expected + b, **close)
    with pytest.raises(ValueError, match=r"out must have shape \(2, 41, 5\), got \(3, 2, 41, 5\)"):
        _bmm_chunk_bwd(a, dout, out=b.new_empty(3, *b.shape))
    seq_idx = torch.arange(41).expand(2, 41).int() // 7
    masked = _bmm_chunk_fwd(a, b, SIZE, seq_idx=seq_idx)
    assert masked[:, 0, 6, 7].eq(0).all() and masked[:, 0, 6, 5].ne(0).all()


def _bmm_chunk_fwd_with_gradient(a, b):
    a, b = (torch.nn.functional.pad(tensor, (0, 0, 0, 7)).unflatten(1, (3, SIZE)) for tensor in (a, b))
    return a @ b.mT


@pytest.mark.parametrize("z", [False, True])
@pytest.mark.parametrize("seq_idx", [False, True])
def test_combined_directions(seq_idx, z, device):
    tensors, options = inputs(seq_idx, z, device=device)
    out, out_x, dt, dA_cumsum, states, final = _mamba_chunk_scan_combined_fwd(**tensors, chunk_size=SIZE, **options)
    expected = outputs_and_gradients(
        lambda **t: ssd_chunk_scan_combined_ref(**t, chunk_size=SIZE, **options, return_final_states=True), tensors
    )
    torch.testing.assert_close(out, expected["out0"], **close)
    torch.testing.assert_close(final, expected["out1"], **close)
    assert (out_x is not None) == z
    assert dt.shape == dA_cumsum.shape == (2, 4, 3, SIZE) and states.shape == (2, 3, 4, 6, 5)
    torch.testing.assert_close(states[:, 0], tensors["initial_states"])
    again = chunk_scan(
        tensors["B"], tensors["C"], tensors["x"], dt, dA_cumsum, states, tensors["D"], tensors["z"], tensors["seq_idx"]
    )
    torch.testing.assert_close(again, out, **close)

    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    leaves = {n: t.clone().requires_grad_() if n in names and t is not None else t for n, t in tensors.items()}
    reference = ssd_chunk_scan_combined_ref(**leaves, chunk_size=SIZE, **options, return_final_states=True)
    dout, dfinal = (torch.randn_like(tensor) for tensor in reference)
    wanted = [name for name in names if leaves[name] is not None]
    gradients = torch.autograd.grad(reference, [leaves[name] for name in wanted], (dout, dfinal))
    target = torch.empty_like(tensors["x"])
    rest = {key: tensor for key, tensor in tensors.items() if key not in ("x", "dt", "A", "B", "C")}
    *found, again = _mamba_chunk_scan_combined_bwd(
        dout, *(tensors[key] for key in ("x", "dt", "A", "B", "C")), out_x if z else out, SIZE, **rest, **options,
        dfinal_states=dfinal, dx=target, recompute_output=True,
    )  # fmt: skip
    assert found[0] is target and len(found) == 9
    torch.testing.assert_close(again, out, **close)
    found = dict(zip(names, found, strict=True))
    assert (found["z"] is None) != z
    for name, gradient in zip(wanted, gradients, strict=True):
        torch.testing.assert_close(found[name], gradient, **close, msg=lambda text, name=name: f"{name}: {text}")


def test_combined_forward_with_cu_seqlens(device):
    tensors, options = inputs(False, device=device)
    row = {n: t[:1] if n in ("x", "dt", "B", "C", "z", "initial_states") else t for n, t in tensors.items()}
    bounds = torch.tensor([0, 7, 7, 41], dtype=torch.int32, device=device)
    *_, final, varlen = _mamba_chunk_scan_combined_fwd(**row, chunk_size=SIZE, cu_seqlens=bounds, **options)
    _, expected_final, expected = mamba_chunk_scan_combined(
        **row, chunk_size=SIZE, cu_seqlens=bounds, **options, return_final_states=True, return_varlen_states=True
    )
    assert torch.equal(varlen, expected) and torch.equal(final, expected_final)


def test_yardstick():
    tensors, _ = inputs(False)
    given = [tensors[name] for name in ("x", "dt", "A", "B", "C", "D", "z")]
    given[1] = given[1].abs().requires_grad_()
    given[2].requires_grad_()
    out = ssd_selective_scan(*given)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, given[1:3], dout)
    for found, gradient in zip(selective_scan_bwd(dout, *given), expected, strict=True):
        torch.testing.assert_close(found, gradient)
