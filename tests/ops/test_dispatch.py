"""Calls on plain tensors go past torch's dispatcher: whoever watches it, or needs it, must notice nothing of that."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mamba_ssm import Mamba, Mamba2
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
from mamba_ssm.ops.state_update import selective_state_update_ref
from mamba_ssm.ops.triton.selective_state_update import selective_state_update

# Both sides do the same float32 arithmetic on a few dozen steps; the order of sums differs.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def scan_tensors(device, length=20, dim=6):
    """u, delta, A, B, C with B and C of three dimensions."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, dim, length), (2, dim, length), (dim, 4), (2, 4, length), (2, 4, length)]
    u, delta, A, B, C = (torch.rand(*shape, generator=generator).to(device) for shape in shapes)
    return u - 0.5, delta, -A, B - 0.5, C - 0.5


def negated_view(tensor):
    """-tensor as torch keeps it until somebody needs the values: a view with its negative bit set."""
    view = torch.complex(tensor, tensor).conj().imag
    assert view.is_neg()
    return view


def operators(graph_module):
    return [str(node.target) for node in graph_module.graph.nodes if "mamba_ssm" in str(node.target)]


@pytest.mark.parametrize("length", [1, 20])
def test_negative_bit_scan(length, device):
    u, *rest = scan_tensors(device, length)
    torch.testing.assert_close(selective_scan_fn(negated_view(u), *rest), selective_scan_ref(-u, *rest), **CLOSE)


def test_negative_bit_update(device):
    u, delta, A, B, C = (t[..., 0] if t.dim() == 3 else t for t in scan_tensors(device))
    state, expected_state = torch.zeros(2, 6, 4, device=device), torch.zeros(2, 6, 4, device=device)
    out = selective_state_update(state, negated_view(u), delta, A, B, C)
    expected = selective_state_update_ref(expected_state, -u, delta, A, B, C)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(state, expected_state, **CLOSE)


def test_what_is_written_in_place_is_refused_where_it_cannot_be(device):
    u, delta, A, B, C = (t[..., 0] if t.dim() == 3 else t for t in scan_tensors(device))
    state, weight = torch.zeros(2, 6, 4, device=device), torch.ones(6, 4, device=device)
    with pytest.raises(ValueError, match="final_states_out is written in place, but its elements share memory"):
        causal_conv1d_fn(u[..., None], weight, final_states_out=torch.zeros(2, 6, 1, device=device).expand(2, 6, 3))
    for spoiled, message in (
        (negated_view(state), "and cannot be a negated view"),
        (state[:1].expand(2, 6, 4), r"but its elements share memory \(strides \(0, 4, 1\)\)"),
        (state[:, :, :1].expand(2, 6, 4), r"but its elements share memory \(strides \(24, 4, 0\)\)"),
        (state.flatten()[:27].unfold(0, 24, 3).view(2, 6, 4), r"but its elements share memory \(strides \(3, 4, 1\)\)"),
        (state.as_strided((2, 6, 4), (24, 3, 1)), r"but its elements share memory \(strides \(24, 3, 1\)\)"),
    ):
        with pytest.raises(ValueError, match="state is written in place,? " + message):
            selective_state_update(spoiled, u, delta, A, B, C)
        with pytest.raises(ValueError, match="conv_state is written in place,? " + message):
            causal_conv1d_update(u, spoiled, weight)
    assert not state.any()
    cache = torch.zeros(6, 8, 24, device=device)
    for apart in (cache[::3, 2:, ::6], cache[:4, :6, ::12].permute(2, 1, 0)):
        selective_state_update(apart, u, delta, A, B, C)
    selective_state_update(state[:1].as_strided((1, 6, 4), (0, 4, 1)), u[:1], delta[:1], A, B[:1], C[:1])


@pytest.mark.parametrize("op", ["scan", "conv", "block", "block2"])
def test_batched_gradients(op, device):
    """is_grads_batched hides a dimension of the gradients from the operator."""
    if op == "scan":
        inputs = [t.requires_grad_() for t in scan_tensors(device)]
        out = selective_scan_fn(*inputs)
    elif op == "conv":
        inputs = [torch.randn(2, 6, 20, device=device, requires_grad=True), torch.randn(6, 4, device=device)]
        out = causal_conv1d_fn(*inputs)
        inputs = inputs[:1]
    else:
        inputs = [torch.randn(2, 20, 16, device=device, requires_grad=True)]
        block = Mamba(16, device=device) if op == "block" else Mamba2(16, d_state=8, headdim=8, device=device)
        out = block(inputs[0])
    directions = torch.randn(3, *out.shape, device=device)
    batched = torch.autograd.grad(out, inputs, directions, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(out, inputs, directions[i], retain_graph=True)
        torch.testing.assert_close([grad[i] for grad in batched], list(one), **CLOSE)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("pre_dispatch", [False, True], ids=["fx", "pre_dispatch"])
def test_make_fx_sees_the_operator(pre_dispatch, grad, device):
    u, delta, A, B, C = scan_tensors(device)
    A.requires_grad_(grad)
    graph = make_fx(lambda x: selective_scan_fn(x, delta, A, B, C), pre_dispatch=pre_dispatch)(u)
    assert operators(graph) == ["mamba_ssm.selective_scan.default"]
    torch.testing.assert_close(graph(2 * u), selective_scan_ref(2 * u, delta, A, B, C), **CLOSE)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_jit_trace_of_a_block_can_be_saved(grad, device, tmp_path):
    block = Mamba(16, device=device).requires_grad_(grad)
    x = torch.randn(2, 20, 16, device=device)
    torch.jit.trace(block, (x,)).save(tmp_path / "block.pt")
    loaded = torch.jit.load(tmp_path / "block.pt")
    torch.testing.assert_close(loaded(2 * x), block(2 * x), **CLOSE)


def test_profiler_sees_the_operator(device):
    with torch.profiler.profile() as profile:
        selective_scan_fn(*scan_tensors(device))
    assert "mamba_ssm::selective_scan" in {event.key for event in profile.key_averages()}


def test_meta_tensor_beside_real_ones(device):
    u, delta, A, B, C = scan_tensors(device)
    for tensors in ((u, delta.to("meta"), A, B, C), (u, delta, A.to("meta"), B, C)):
        with pytest.raises(ValueError, match="meta"):
            selective_scan_fn(*tensors)


def test_three_dimensional_matrices(device):
    """(B, N, L) is (B, 1, N, L): values and gradients, with more channels than one block of the GPU takes."""
    results = []
    for wide in (False, True):
        tensors = [t.requires_grad_() for t in scan_tensors(device, length=70, dim=80)]
        u, delta, A, B, C = tensors
        out = selective_scan_fn(u, delta, A, *((B[:, None], C[:, None]) if wide else (B, C)))
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    torch.testing.assert_close(*results, **CLOSE)
