"""The operators inside torch: opcheck, compilers, torch.func, forward mode, versions, inference mode, graphs."""

import pytest
import torch
from _helpers.cases import ConvCase, ScanCase, outputs_and_gradients

import mamba_ssm
from mamba_ssm._torch import private
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.k_activations import swiglu
from mamba_ssm.ops.triton.layer_norm import layer_norm_fn
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_torch_2_4 = pytest.mark.skipif(
    TORCH < (2, 4), reason="torch before 2.4 has no opcheck, and 2.2 no in-place compile"
)


def scan_arguments(device, grad=False, **options):
    tensors = ScanCase(2, 6, 70, softplus=False, **options).inputs(torch.float32, device)
    return {
        name: t.requires_grad_() if grad and t is not None and t.is_floating_point() else t
        for name, t in tensors.items()
    }


def opcheck_rows(device, grad):
    """(operator, arguments) for each operator, with and without options."""
    ops = torch.ops.mamba_ssm
    conv = ConvCase(2, 6, 20, initial_states=True).inputs(torch.float32, device)
    full = scan_arguments(device, grad, initial_state=True)
    lean = scan_arguments(device, grad, D=False, z=False, delta_bias=False)
    for tensors, last in ((full, True), (lean, False)):  # without checkpoints, whose spare elements have no value
        yield ops.selective_scan.default, (*ordered(tensors), True, last, False, last)
    x, weight, bias, states = (
        t.detach().requires_grad_(grad) for t in (conv["x"], conv["weight"], conv["bias"], conv["initial_states"])
    )
    yield ops.causal_conv1d.default, (x, weight, bias, None, states, True, True)
    yield ops.causal_conv1d.default, (x, weight, None, None, None, False, False)
    seq_idx = (torch.arange(20, device=device) // 8).to(torch.int32).repeat(2, 1)
    yield ops.causal_conv1d.default, (x, weight, bias, seq_idx, states, False, True)
    yield from norm_rows(device, grad)
    if grad:
        return
    for tensors in (full, lean):
        reverse = () if tensors is lean else (True,)  # programs that know of no such argument
        out, last, checkpoints = ops.selective_scan(*ordered(tensors), True, True, True, *reverse)
        dlast = last if tensors is full else None
        options = (True, tensors is full, tensors is full, *reverse)
        yield ops.selective_scan_backward.default, (out, dlast, *ordered(tensors), checkpoints, *options)
    bare = [full[name] for name in ("u", "delta", "A", "B", "C", "initial_state")]
    tangents = [torch.randn_like(tensor) for tensor in (*bare, full["u"])]
    for reverse, dlast, packed in ((False, None, None), (True, last, full["seq_idx"])):
        arguments = (*bare, packed, out, dlast, *tangents, reverse)
        yield ops.selective_scan_double_backward.default, arguments
    for packed in None, seq_idx:
        yield ops.causal_conv1d_backward.default, (x, None, x, weight, bias, packed, states, True, True)
    state, step = torch.randn(2, 6, 4, device=device), torch.randn(2, 6, device=device)
    yield ops.causal_conv1d_update.default, (step, state, weight, bias, None, None, True)
    A, B = -torch.rand(6, 4, device=device), torch.randn(2, 4, device=device)
    yield ops.selective_state_update.default, (state, step, step, A, B, B, None, step, None, None, True)
    rows, copies = torch.tensor([1, 0], device=device), torch.zeros(2, 3, 6, 4, device=device)
    step, B = (tensor[:, None].expand(-1, 3, -1) for tensor in (step, B))
    yield ops.selective_state_update.default, (state, step, step, A, B, B, None, step, None, None, True)
    moved = torch.tensor([3, 2], device=device), copies
    state = torch.randn(4, 6, 4, device=device)
    for destinations in (moved, (None, copies)):
        arguments = (state, step, step, A, B, B, None, None, None, rows, *destinations, True)
        yield ops.selective_state_update_to.default, arguments


def norm_rows(device, grad):
    ops = torch.ops.mamba_ssm
    x, residual, z = (torch.randn(2, 3, 12, device=device).requires_grad_(grad) for _ in range(3))
    weight, bias = (torch.randn(12, device=device).requires_grad_(grad) for _ in range(2))
    half = x.detach().half().requires_grad_(grad)
    yield ops.add_norm.default, (x, residual, weight, bias, 1e-5, True, False, False, True)
    yield ops.add_norm.default, (half, residual, weight, None, 1e-5, True, False, True, False)
    yield ops.add_norm.default, (half, None, weight, None, 1e-5, True, True, True, True)
    yield ops.gated_norm.default, (x, weight, bias, z, 1e-5, 4, True, False, True)
    yield ops.gated_norm.default, (half, weight, None, z, 1e-5, 12, False, True, False)
    yield ops.swiglu.default, (x,)
    if grad:
        return
    _, total, mean, rstd = ops.add_norm(x, residual, weight, bias, 1e-5, True, False, False, True)
    yield ops.add_norm_backward.default, (x, x, total, weight, bias, mean, rstd, False)
    yield ops.add_norm_backward.default, (half, None, total, weight, None, None, rstd, True)
    _, mean, rstd = ops.gated_norm(x, weight, bias, z, 1e-5, 4, True, False, True)
    yield ops.gated_norm_backward.default, (z, x, weight, bias, z, mean, rstd, 4, True, False)
    yield ops.gated_norm_backward.default, (z, x, weight, None, None, None, rstd, 4, True, True)
    yield ops.swiglu_backward.default, (x[..., :6], x, True)


def ordered(tensors):
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "seq_idx")
    return tuple(tensors[name] for name in names)


@needs_torch_2_4
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_opcheck(grad, device):
    for op, arguments in opcheck_rows(device, grad):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, dynamic, device, request):
    if backend == "inductor":
        request.getfixturevalue("needs_inductor")

    def run(**t):
        out, state = selective_scan_fn(**t, delta_softplus=True, return_last_state=True)
        return out * 2 + selective_scan_fn(**t, delta_softplus=True, reverse=True), state + 1

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)
    for seqlen in (70, 150) if dynamic else (150,):  # with fixed sizes each is compiled anew
        tensors = ScanCase(2, 6, seqlen, initial_state=True).inputs(torch.float32, device)
        expected = outputs_and_gradients(run, tensors)
        for name, value in outputs_and_gradients(compiled, tensors).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"final_states": True}, {"seq_idx": True}], ids=str)
def test_compile_conv(options, device):
    def doubled(**tensors):
        results = causal_conv1d_fn(**tensors)
        return 2 * (results[0] if isinstance(results, tuple) else results)

    run = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    tensors = ConvCase(2, 6, 20, initial_states=True, **options).inputs(torch.float32, device)
    expected = outputs_and_gradients(doubled, tensors)
    for name, value in outputs_and_gradients(run, tensors).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_norms(dynamic, device):
    def run(x, residual, weight, z):
        out, total = layer_norm_fn(x, weight, None, residual, prenorm=True, residual_in_fp32=True)
        out, first = layer_norm_fn(out, weight, weight, prenorm=True, residual_in_fp32=True, is_rms_norm=True)
        out = rmsnorm_fn(out, weight, weight, z, norm_before_gate=False)
        return rmsnorm_fn(out, weight, None, z, group_size=4) * swiglu(torch.cat([first, z], -1)) + total

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (5, 9) if dynamic else (9,):  # with fixed sizes each is compiled anew
        tensors = {name: torch.randn(2, length, 12, device=device) for name in ("x", "residual", "z")}
        tensors["weight"] = torch.randn(12, device=device)
        tensors["x"] = tensors["x"].bfloat16()
        expected = outputs_and_gradients(run, tensors)
        for name, value in outputs_and_gradients(compiled, tensors).items():
            torch.testing.assert_close(value, expected[name])


@needs_torch_2_4
def test_compile_in_place_operators(device):
    A, weight = -torch.rand(6, 4, device=device), torch.randn(6, 4, device=device)

    def step(x, conv_state, state):
        x = causal_conv1d_update(x, conv_state, weight, activation="silu")
        return selective_state_update(state, x, x, A, x[:, :4], x[:, 1:5], dt_softplus=True) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    states = [torch.zeros(2, 6, 4, device=device) for _ in range(4)]
    for _ in range(3):
        x = torch.randn(2, 6, device=device)
        torch.testing.assert_close(compiled(x, *states[:2]), step(x, *states[2:]))
        torch.testing.assert_close(states[:2], states[2:])


def in_place_operators(device):
    """state, x, and the two operators that write state, as functions without arguments."""
    state, x, weight = (torch.randn(*shape, device=device) for shape in ((2, 6, 4), (2, 6), (6, 4)))
    A, B = -torch.rand(6, 4, device=device), torch.randn(2, 4, device=device)

    def conv(state=state):
        return causal_conv1d_update(x, state, weight)

    def update(state=state):
        return selective_state_update(state, x, x, A, B, B)

    return state, x, (conv, update)


@pytest.mark.skipif(not private.COMPILES_FUNCTIONS, reason="torch 2.8 and later")
def test_the_compiler_has_operators_before_it_meets_them(monkeypatch):
    """Of one that is new to it torch up to 2.12 writes down what the arguments are made of: minutes in deep models."""
    import torch._inductor.lowering as lowering

    ops = torch.ops.mamba_ssm.add_norm.default, torch.ops.mamba_ssm.selective_scan.default
    for op in ops:
        monkeypatch.delitem(lowering.lowerings, op, raising=False)
        monkeypatch.delitem(lowering._maybe_layout_constraints, op, raising=False)
    with private.FakeTensorMode():
        x, weight = torch.empty(2, 8), torch.empty(8)
        layer_norm_fn(x, weight, None, is_rms_norm=True)
        selective_scan_fn(*torch.empty(2, 1, 4, 3), torch.empty(4, 2), *torch.empty(2, 1, 2, 3))
    assert all(op in lowering.lowerings for op in ops)
    constraints = {lowering.maybe_layout_constraints(op) for op in ops}
    assert constraints == {lowering.constrain_to_fake_tensors}  # what torch takes for operators that say nothing


def test_in_place_operators_bump_versions(device):
    state, _, functions = in_place_operators(device)

    for function in functions:
        version = state._version
        function()
        assert state._version > version
        product = (torch.ones_like(state).requires_grad_() * state).sum()
        function()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.inference_mode():
            function()


def test_in_place_operators_have_no_gradient(device):
    """Decoding with grad mode on runs, as upstream's does: a warning says that the result is detached."""
    state, x, functions = in_place_operators(device)
    before = state.clone()
    for function in functions:
        with torch.no_grad():
            expected, after = function(), state.clone()
        state.copy_(before)
        x.requires_grad_()
        with pytest.warns(UserWarning, match="has no gradient: its result is detached") as seen:
            out = function()
        assert seen[0].filename == __file__
        assert not out.requires_grad and torch.equal(out, expected) and torch.equal(state, after)
        x.requires_grad_(False)
        state.copy_(before)


@pytest.mark.filterwarnings("ignore:.*has no gradient")
def test_a_state_of_a_differentiable_prompt_is_detached(device):
    """A cache whose states were computed with grad mode on: what a step leaves there depends on nothing before it."""
    state, _, functions = in_place_operators(device)
    for function in functions:
        start = state.clone().requires_grad_()
        cache = torch.zeros(3, 6, 4, device=device)
        cache[:2].copy_(2 * start)
        out = function(cache[:2])
        assert torch.equal(out, function(2 * state)) and not out.requires_grad
        cache[2].copy_(start[0])
        (grad,) = torch.autograd.grad(cache.sum(), start)
        assert grad[0].eq(1).all() and grad[1].eq(0).all()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            function(start)


@needs_torch_2_4
@pytest.mark.filterwarnings("ignore:.*has no gradient")
def test_compiled_decoding_with_grad_mode_on(device):
    state, x, functions = in_place_operators(device)
    x.requires_grad_()
    for function in functions:
        expected_state = state.clone()
        expected = function(expected_state)
        out = torch.compile(function, backend="aot_eager", fullgraph=True)(state)
        assert torch.equal(out, expected) and torch.equal(state, expected_state) and not out.requires_grad


def test_inference_mode(device):
    with torch.inference_mode():
        tensors = scan_arguments(device)
        out = selective_scan_fn(**tensors)
        state = torch.zeros(2, 6, 4, device=device)
        causal_conv1d_update(torch.randn(2, 6, device=device), state, torch.randn(6, 4, device=device))
    assert out.is_inference()
    assert state.ne(0).any()


def test_saved_tensors_changed_in_place_are_noticed(device):
    tensors = scan_arguments(device, grad=True)
    out = selective_scan_fn(**tensors)
    with torch.no_grad():
        tensors["u"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_mixed_dtypes_under_autocast(device):
    """As of a block whose B and C come from a norm with float32 weights; without autocast it is an error."""
    tensors = ScanCase(2, 6, 70).inputs(torch.float32, device)
    narrow = {name: tensor.bfloat16() if name in ("u", "delta") else tensor for name, tensor in tensors.items()}
    with torch.autocast(device, dtype=torch.bfloat16):
        out = selective_scan_fn(**narrow, delta_softplus=True)
        wide = selective_scan_fn(**tensors, delta_softplus=True)
    assert out.dtype == torch.bfloat16 and torch.equal(wide, selective_scan_fn(**tensors, delta_softplus=True))
    same = {name: tensor.bfloat16() if name in ("B", "C", "z") else tensor for name, tensor in narrow.items()}
    assert torch.equal(out, selective_scan_fn(**same, delta_softplus=True))
    with pytest.raises(TypeError, match="B must have the dtype of u, bfloat16, got float32"):
        selective_scan_fn(**{**narrow, "z": same["z"]}, delta_softplus=True)


def test_checkpoint_and_hooks(device):
    tensors = scan_arguments(device, grad=True)
    run = torch.utils.checkpoint.checkpoint
    found = outputs_and_gradients(
        lambda **t: run(lambda u: selective_scan_fn(**{**t, "u": u}), t["u"], use_reentrant=False), tensors
    )
    for name, value in outputs_and_gradients(lambda **t: selective_scan_fn(**t), tensors).items():
        torch.testing.assert_close(found[name], value)


def test_all_operators_are_registered():
    assert mamba_ssm.__version__ >= "2.4.0"
    names = (
        "selective_scan",
        "causal_conv1d",
        "causal_conv1d_update",
        "cross_entropy",
        "selective_state_update",
        "selective_state_update_to",
    )
    norms = ("add_norm", "gated_norm", "swiglu", "add_norm_backward", "gated_norm_backward", "swiglu_backward")
    for name in (*names, *norms, "selective_scan_backward", "causal_conv1d_backward"):
        for key in ("CPU", "CUDA", "Autograd", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mamba_ssm::{name}", key) or key == "Autograd"


@pytest.mark.gpu
def test_cuda_graph_and_side_streams(cuda):
    tensors = scan_arguments(cuda, initial_state=True)
    expected = selective_scan_fn(**tensors, delta_softplus=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = selective_scan_fn(**tensors, delta_softplus=True)
    stream.synchronize()
    assert torch.equal(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selective_scan_fn(**tensors, delta_softplus=True)
    tensors["u"].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, selective_scan_fn(**tensors, delta_softplus=True))


@pytest.mark.gpu
def test_another_device_than_the_current_one(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    tensors = scan_arguments("cuda:1")
    out = selective_scan_fn(**tensors)
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0
