"""The parts of upstream's Mamba-3 kernels: put together as upstream does it they are the scan and its gradients."""

import itertools
import math

import pytest
import torch
from _helpers.mamba3_cases import STATES, Mamba3Case

from mamba_ssm.ops.mamba3_scan import mamba3_scan_ref
from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd import mamba_mimo_bwd_combined
from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd_varlen import mamba_mimo_bwd_combined_varlen
from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_fwd import mamba_mimo_forward
from mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_fwd_varlen import mamba_mimo_forward_varlen
from mamba_ssm.ops.triton.mamba3 import mamba3_mimo_utils, utils
from mamba_ssm.ops.triton.mamba3.angle_dt import angle_dt_bwd, angle_dt_fwd
from mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import (
    apply_rotary_qk_inference_fwd,
    apply_rotary_qk_inference_reference,
)
from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import Mamba3Output, mamba3_siso_combined

BOUNDS = [None, (0, 5, 5, 6, 13), (0, 8, 16), (0, 3)]


def chunks(seqlen, size, bounds):
    """(chunk, the steps in it), of chunks that hold any, and how many chunks there are."""
    spans = [(0, seqlen)] if bounds is None else list(itertools.pairwise(bounds))
    found = []
    for row, (begin, end) in enumerate(spans):
        first = 0 if bounds is None else begin // size + row
        found += [(first + i, range(s, min(s + size, end))) for i, s in enumerate(range(begin, end, size))]
    return found, -(-seqlen // size) if bounds is None else seqlen // size + len(spans)


def packed(bounds, device):
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("size", [1, 4, 32])
def test_sums_within_chunks(bounds, size, device):
    """Each sum and each gradient as it is defined, in float64; those of exponentials are upstream's convention."""
    torch.manual_seed(0)
    seqlen = 16 if bounds == (0, 8, 16) else 13
    da = -torch.rand(2, 3, seqlen, device=device)
    found, count = chunks(seqlen, size, bounds)
    cu_seqlens = packed(bounds, device)
    cs, rev, segsum = mamba3_mimo_utils.compute_dacs_segsum_triton_varlen(da, size, cu_seqlens)
    assert segsum.shape == (2, 3, count, size, size)
    exact = da.double()
    dcs, drev = torch.randn(2, 2, 3, seqlen, device=device)
    dseg = torch.zeros(segsum.shape, device=device)  # [j, i], zero of steps that a chunk lacks
    gradient = torch.zeros_like(exact)
    for chunk, steps in found:
        dseg[..., chunk, : len(steps), : len(steps)] = torch.randn(2, 3, len(steps), len(steps), device=device)
        for i, t in enumerate(steps):
            earlier, later = exact[..., steps.start : t + 1].sum(-1), exact[..., t + 1 : steps.stop].sum(-1)
            torch.testing.assert_close(cs[..., t].double(), earlier)
            torch.testing.assert_close(rev[..., t].double(), later)
            gradient[..., steps.start : t + 1] += (earlier.exp() * dcs[..., t])[..., None]
            gradient[..., t + 1 : steps.stop] += (later.exp() * drev[..., t])[..., None]
            for j in range(i):
                between = exact[..., steps.start + j + 1 : t + 1].sum(-1)
                torch.testing.assert_close(segsum[..., chunk, i, j].double(), between)
                gradient[..., steps.start + j + 1 : t + 1] += (between.exp() * dseg[..., chunk, j, i])[..., None]
    assert segsum.triu().eq(0).all()
    backward = mamba3_mimo_utils.bwd_dadt_fused_triton_varlen
    dda = backward(dseg, segsum, dcs, drev, cs, rev, size, cu_seqlens)
    torch.testing.assert_close(dda.double(), gradient, rtol=1e-4, atol=1e-4)
    if bounds is None:
        for one, other in zip(mamba3_mimo_utils.compute_dacs_segsum_triton(da, size), (cs, rev, segsum), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="a sum must have shape"):
        backward(dseg, segsum, dcs, drev, cs[..., 1:], rev, size, cu_seqlens)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_gradients_of_trap_and_dt(bounds, device):
    torch.manual_seed(0)
    seqlen = 16 if bounds == (0, 8, 16) else 13
    trap, dt, dfactor, dgamma = torch.randn(4, 2, 3, seqlen, device=device)
    found = mamba3_mimo_utils.bwd_dtrap_ddt_triton_varlen(trap, dt, dfactor, dgamma, 4, packed(bounds, device))
    share, slope = torch.sigmoid(trap.double()), torch.sigmoid(trap.double()) * torch.sigmoid(-trap.double())
    ddt, dtrap = (dfactor + dgamma) * share, (dfactor + dgamma) * dt * slope
    for t in range(1, seqlen):
        if bounds is None or t not in bounds:  # a step's part of the factor before it
            ddt[..., t] += dfactor[..., t - 1] * (1 - share[..., t])
            dtrap[..., t] -= dfactor[..., t - 1] * dt[..., t] * slope[..., t]
    for one, other in zip(found, (ddt, dtrap), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert mamba3_mimo_utils.bwd_dtrap_ddt_triton(trap.bfloat16(), dt, dfactor, dgamma, 4)[1].dtype == torch.bfloat16


MIMO = {
    "whole": Mamba3Case(2, 21, 4, 8, rank=3, nangles=4),
    "groups": Mamba3Case(1, 16, 4, 8, rank=2, groups=2, nangles=8, D=False),
    "unreduced": Mamba3Case(2, 9, 2, 6, rank=2, groups=2, dstate=9, nangles=3, reduced=False, Z=False),
    "packed": Mamba3Case(1, 25, 2, 8, rank=2, cu_seqlens=(0, 9, 9, 10, 23)),
    "one-step": Mamba3Case(1, 1, 1, 1, rank=1, dstate=2, nangles=1),
}


@pytest.mark.parametrize("case", MIMO.values(), ids=MIMO)
def test_mimo(case, device):
    """Forward and backward as upstream composes them of angle_dt, the sums, and the two kernels."""
    case = Mamba3Case(**{**vars(case), "angles_of_heads": True})
    tensors = case.inputs(torch.float32, device)
    exact = {
        name: None if value is None else value.double().requires_grad_() if value.is_floating_point() else value
        for name, value in tensors.items()
    }
    wanted, angle, ssm, k, _ = case.run(mamba3_scan_ref)(**exact)
    dout = torch.randn_like(wanted)
    names = [name for name, value in exact.items() if value is not None and value.requires_grad]
    grads = torch.autograd.grad(wanted, [exact[name] for name in names], dout)
    expected = dict(zip(names, grads, strict=True))

    chunk = 8
    DA, DT, trap = (tensors[name].transpose(1, 2).contiguous() for name in ("ADT", "DT", "Trap"))
    cu_seqlens = tensors.get("cu_seqlens")
    summed, last = angle_dt_fwd(tensors["Angles"], DT, return_output_state=True, cu_seqlens=cu_seqlens)
    cs, rev, segsum = mamba3_mimo_utils.compute_dacs_segsum_triton_varlen(DA, chunk, cu_seqlens)
    biased = [tensors[name] for name in ("Q", "K", "V", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out")]
    z, D, mimo_z = tensors["Z"], tensors["D"], tensors["MIMO_Z"]
    decays, options = (cs, rev, DT, trap), (chunk, 4, torch.float32)
    forward, backward, packing = mamba_mimo_forward, mamba_mimo_bwd_combined, {}
    if cu_seqlens is not None:
        forward, backward = mamba_mimo_forward_varlen, mamba_mimo_bwd_combined_varlen
        packing = {"cu_seqlens": cu_seqlens}
    given = *biased, z, D, mimo_z, summed, *decays, segsum, *options
    out, state, last_k = forward(*given, return_state=True, **packing)
    assert forward(*given, **packing)[1:] == (None, None)
    for found, other in ((out, wanted), (state.mT, ssm), (last_k, k), (torch.cos(last), torch.cos(angle))):
        torch.testing.assert_close(found.double(), other, rtol=1e-4, atol=1e-4)

    dout = dout.float()
    found = backward(dout, *biased, z, mimo_z, summed, *decays, D, segsum, *options, **packing)
    order = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", "D", "Z")
    found = dict(zip(order, found, strict=True))
    found["Angles"], of_angles, none = angle_dt_bwd(
        found["Angles"], tensors["Angles"], DT, chunk_size=chunk, cu_seqlens=cu_seqlens
    )
    assert none is None
    found["DT"] = found["DT"] + of_angles
    for name in order:
        if tensors[name] is None:
            assert found[name] is None
            continue
        mine = found[name].transpose(1, 2) if name in ("ADT", "DT", "Trap") else found[name]
        scale = max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(mine.double(), expected[name], rtol=1e-3, atol=1e-4 * scale, msg=name)


def test_mimo_dtypes_and_errors(device):
    tensors = Mamba3Case(1, 9, 2, 8, rank=2, angles_of_heads=True).inputs(torch.bfloat16, device)
    DA, DT, trap = (tensors[name].transpose(1, 2) for name in ("ADT", "DT", "Trap"))
    sums = mamba3_mimo_utils.compute_dacs_segsum_triton(DA, 4)
    biased = [tensors[name] for name in ("Q", "K", "V", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out")]
    rest = tensors["Z"], tensors["D"], tensors["MIMO_Z"]

    def run(angles, size, dtype):
        given = *biased, *rest, angles, *sums[:2], DT, trap, sums[2], size, 4, dtype
        return mamba_mimo_forward(*given, return_state=True)

    out, state, k = run(tensors["Angles"], 4, "bfloat16")
    assert out.dtype == k.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert run(tensors["Angles"], 4, torch.float32)[0].dtype == torch.float32
    with pytest.raises(ValueError, match="each angle rotates two of the 16 entries of q, got 9 angles"):
        run(tensors["Angles"].repeat(1, 1, 1, 3)[..., :9], 4, None)
    with pytest.raises(ValueError, match="chunk_size must be a positive integer, got 0"):
        run(tensors["Angles"], 0, None)


@pytest.mark.parametrize("bounds", [None, (0, 4, 4, 9)], ids=str)
def test_gradients_of_angles(bounds, device):
    """Of the state, too, against running sums in float64."""
    torch.manual_seed(0)
    angle, dt = torch.randn(1, 9, 2, 3, device=device), torch.rand(1, 2, 9, device=device)
    rows = 1 if bounds is None else 3
    leaves = [tensor.double().requires_grad_() for tensor in (angle, dt, torch.zeros(rows, 2, 3, device=device))]
    steps = math.pi * torch.tanh(leaves[0]) * leaves[1].transpose(1, 2)[..., None]
    spans = [(0, 9)] if bounds is None else [(0, 4), (4, 4), (4, 9)]
    sums = [leaves[2][row] + steps[0, begin:end].cumsum(0) for row, (begin, end) in enumerate(spans)]
    ends = torch.stack([part[-1] if len(part) else leaves[2][row] for row, part in enumerate(sums)])
    dout, dends = torch.randn(1, 9, 2, 3, device=device), torch.randn(rows, 2, 3, device=device)
    expected = torch.autograd.grad((torch.cat(sums)[None], ends), leaves, (dout.double(), dends.double()))
    options = {"grad_output_state": dends, "cu_seqlens": packed(bounds, device)}
    for found, other in zip(angle_dt_bwd(dout, angle, dt, True, **options), expected, strict=True):
        torch.testing.assert_close(found.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pairwise", [True, False])
def test_rotary_reference_has_gradients(pairwise, device):
    tensors = Mamba3Case(2, 1, 4, 8, rank=2, groups=4, angles_of_heads=True, states=True).inputs(torch.float32, device)
    q, k, angle, dt = (tensors[name].squeeze(1) for name in ("Q", "K", "Angles", "DT"))
    given = q, k, tensors["angle_state"], angle, dt, tensors["Q_bias"].transpose(0, 1), None, True, pairwise
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in given]
    found = apply_rotary_qk_inference_reference(*leaves)
    plain = apply_rotary_qk_inference_fwd(*given[:7], False, *given[7:])
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other) and one.requires_grad and not other.requires_grad
    # a rotation keeps lengths, so does its transpose
    dq = torch.autograd.grad(found[0], leaves[0], torch.ones_like(q))[0]
    torch.testing.assert_close(dq.norm(dim=-1), torch.ones_like(q).norm(dim=-1))


def test_outputs_by_name(device):
    tensors = Mamba3Case(2, 7, 2, 4, angles_of_heads=True).inputs(torch.float32, device)
    given = {name: tensors[name] for name in ("V", "Angles", "D", "Z")}
    given.update({name: tensors[name].transpose(1, 2) for name in ("ADT", "DT", "Trap")})
    given.update({name: tensors[name].squeeze(2) for name in ("Q", "K")})
    given.update({name: tensors[name].squeeze(1) for name in ("Q_bias", "K_bias")})
    results = Mamba3Output(*mamba3_siso_combined(**given, return_final_states=True))
    finals = Mamba3Case(2, 7, 2, 4).run(mamba3_scan_ref)(**{n: v for n, v in tensors.items() if n not in STATES})
    for found, other in zip(vars(results).values(), finals, strict=True):
        torch.testing.assert_close(found, other.view_as(found), rtol=1e-4, atol=1e-4)
    assert Mamba3Output(results.out).final_k_state is None


def test_functions_of_triton_kernels(device):
    x = torch.linspace(-3, 3, 7, device=device)
    for name, function in (("cos", math.cos), ("sin", math.sin), ("tanh", math.tanh)):
        expected = torch.tensor([function(value) for value in x.tolist()], device=device)
        torch.testing.assert_close(getattr(utils, f"{name}_approx")(x), expected)
    torch.testing.assert_close(utils.sech2_approx(x), 1 / torch.cosh(x) ** 2)
    torch.testing.assert_close(utils.silu(x), x * utils.sigmoid_approx(x))
    torch.testing.assert_close(utils.sigmoid_approx(x), 1 / (1 + torch.exp(-x)))
