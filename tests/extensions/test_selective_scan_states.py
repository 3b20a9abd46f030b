"""selective_scan_cuda_oflex_rh, called as Spatial-Mamba's Python code calls it: the scan's states are its output."""

import pytest
import torch
import torch.nn.functional as F
from _helpers.cases import DTYPES, dtype_id

import selective_scan_cuda_oflex
import selective_scan_cuda_oflex_rh


class States(torch.autograd.Function):
    """The scan's states (B, D, N, L); absent: what the caller gives for C and D."""

    @staticmethod
    def forward(ctx, u, delta, A, B, delta_bias, softplus, absent, *options):
        out, x = selective_scan_cuda_oflex_rh.fwd(u, delta, A, B, *absent, delta_bias, softplus, *options)
        ctx.save_for_backward(u, delta, A, B, delta_bias, x)
        ctx.softplus, ctx.absent, ctx.rest = softplus, absent, len(options)
        last = x[:, :, -1, 1::2]
        ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    def backward(ctx, dout, _):
        u, delta, A, B, delta_bias, x = ctx.saved_tensors
        grads = selective_scan_cuda_oflex_rh.bwd(
            u, delta, A, B, *ctx.absent, delta_bias, dout.contiguous(), x, ctx.softplus, 1
        )
        assert len(grads) == 5 + len(ctx.absent)
        assert all(grad is None for grad in grads[4:-1])
        return *grads[:4], grads[-1], None, None, *(None,) * ctx.rest


def loop(u, delta, A, B, delta_bias, softplus):
    """Step by step in float64; B as the module takes it."""
    (batch, dim, seqlen), dstate = u.shape, A.shape[1]
    if B.dim() == 2:
        B = B[None, ..., None].expand(batch, -1, -1, seqlen)
    else:
        B = B if B.dim() == 4 else B[:, None]
        B = B.repeat_interleave(dim // B.shape[1], dim=1)
    delta = delta.repeat_interleave(dim // delta.shape[1], dim=1)
    if delta_bias is not None:
        delta = delta + delta_bias.repeat_interleave(dim // len(delta_bias))[:, None]
    delta = F.softplus(delta) if softplus else delta
    state, states = u.new_zeros(batch, dim, dstate), []
    for t in range(seqlen):
        step = delta[:, :, t, None]
        state = torch.exp(step * A) * state + step * B[..., t] * u[:, :, t, None]
        states.append(state)
    return torch.stack(states, -1)


def inputs(device, dtype=torch.float32, seqlen=37, dim=6, dstate=1, rows=6, B="whole", bias=True):
    torch.manual_seed(0)
    shapes = {"whole": (2, dstate, seqlen), "groups": (2, 3, dstate, seqlen), "constant": (dim, dstate)}
    B = torch.randn(shapes[B], device=device).to(torch.float32 if B == "constant" else dtype)
    return {
        "u": torch.randn(2, dim, seqlen, device=device).to(dtype),
        "delta": (0.5 * torch.rand(2, rows, seqlen, device=device)).to(dtype),
        "A": -torch.rand(dim, dstate, device=device),
        "B": B,
        "delta_bias": torch.rand(rows, device=device) if bias else None,
    }


CASES = {
    "as-there": {},
    "rows": {"rows": 2},
    "groups": {"B": "groups", "bias": False},
    "states": {"dstate": 5, "B": "groups", "rows": 3},
    "states-whole": {"dstate": 3},
    "constant": {"B": "constant", "dstate": 2},
    "one-step": {"seqlen": 1, "dim": 1, "rows": 1},
    "long": {"seqlen": 2100, "dim": 2, "rows": 2, "dstate": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("softplus", [True, False])
def test_states_and_gradients(case, softplus, device):
    given = inputs(device, **CASES[case])
    exact = {name: None if tensor is None else tensor.double().requires_grad_() for name, tensor in given.items()}
    leaves = {name: None if tensor is None else tensor.requires_grad_() for name, tensor in given.items()}
    expected = loop(**exact, softplus=softplus)
    for absent in ((), (None,), (None, None)):
        out, last = States.apply(*leaves.values(), softplus, absent)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last.double(), expected[..., -1], rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    names = [name for name, tensor in leaves.items() if tensor is not None]
    found = torch.autograd.grad(out, [leaves[name] for name in names], dout)
    wanted = torch.autograd.grad(expected, [exact[name] for name in names], dout.double())
    for name, grad, other in zip(names, found, wanted, strict=True):
        scale = max(1.0, other.abs().max().item())  # of sums over the length
        torch.testing.assert_close(grad.double(), other, rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("out_float", [True, False])
def test_dtypes(dtype, out_float, device):
    """The states of halves are those of the same values in float32, rounded where float32 is not asked for."""
    given = inputs(device, dtype, dstate=2, rows=2)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    out, _ = States.apply(*leaves, True, (), 1, out_float)
    wide, _ = States.apply(*(leaf.float() for leaf in leaves), True, ())
    assert out.dtype == (torch.float32 if out_float else dtype)
    unit = 1e-6 if out_float else torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), wide, rtol=unit, atol=unit)
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape


def test_any_strides(device):
    given = inputs(device, dstate=3, B="groups")
    given["A"] = given["A"].t().contiguous().t()
    for name in ("u", "delta", "B"):
        given[name] = given[name].transpose(-1, -2).contiguous().transpose(-1, -2)
    dout = torch.randn(2, 6, 37, 3, device=device).transpose(2, 3)
    dense = [tensor.contiguous() for tensor in given.values()]
    results = []
    for u, delta, A, B, bias in (given.values(), dense):
        out, x = selective_scan_cuda_oflex_rh.fwd(u, delta, A, B, bias, True)
        results.append([out, *selective_scan_cuda_oflex_rh.bwd(u, delta, A, B, bias, dout, x, True)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_it_is_the_scan_before_C(device):
    given = inputs(device, dstate=4, B="groups")
    C = torch.randn_like(given["B"])
    u, delta, A, B, bias = given.values()
    states, _ = selective_scan_cuda_oflex_rh.fwd(u, delta, A, B, bias, True)
    expected = selective_scan_cuda_oflex.fwd(u, delta, A, B, C, None, bias, True)[0]
    found = (states * C.repeat_interleave(2, dim=1)).sum(2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_errors(device):
    u, delta, A, B, bias = inputs(device).values()
    fwd, bwd = selective_scan_cuda_oflex_rh.fwd, selective_scan_cuda_oflex_rh.bwd
    with pytest.raises(ValueError, match="fwd: C and D must be None: it returns the states, so multiply them by C"):
        fwd(u, delta, A, B, B, None, bias, True)
    with pytest.raises(
        TypeError, match=r"fwd takes u, delta, A, B, \(C, D,\) delta_bias, delta_softplus, .* got 4 arg"
    ):
        fwd(u, delta, A, B)
    with pytest.raises(TypeError, match=r"bwd takes .* delta_bias, dout, x, delta_softplus, ..., got 6 arguments"):
        bwd(u, delta, A, B, bias, True)
    out, x = fwd(u, delta, A, B, bias, True)
    with pytest.raises(ValueError, match=r"dout must have shape \(B, D, N, L\) = \(2, 6, 1, 37\), got \(2, 6, 37\)"):
        bwd(u, delta, A, B, bias, out.squeeze(2), x, True)
    with pytest.raises(ValueError, match=r"A must have the 6 channels of u, got shape \(3, 1\)"):
        fwd(u, delta, A[:3], B, bias, True)
    with pytest.raises(ValueError, match=r"B must have shape .*\(B, G, N, L\) or \(B, N, L\)"):
        fwd(u, delta, A, B[..., 1:], bias, True)
    with pytest.raises(ValueError, match=r"delta_bias must have shape .*one for each row of delta"):
        fwd(u, delta, A, B, bias[:4], True)
    with pytest.raises(ValueError, match="delta's rows must divide"):
        fwd(u, delta[:, :4], A, B, None, True)
