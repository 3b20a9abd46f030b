"""The operators of Mamba-2's scan inside torch (opcheck, compilers, torch.func, graphs), and wrong arguments."""

import pytest
import torch
from _helpers.cases import SsdCase, outputs_and_gradients

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_torch_2_4 = pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx")
OPTIONS = (True, 0.0, float("inf"))
# The same kernels on the same values; around them torch may fuse and sum in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def full(device, grad=False):
    case = SsdCase(2, 70, 4, 20, groups=2, D="dim", z=True, initial_states=True, seq_idx=True)
    return with_grad(case.inputs(torch.float32, device), grad)


def lean(device, grad=False):
    return with_grad(SsdCase(2, 70, 4, 20, D="", dt_bias=False).inputs(torch.float32, device), grad)


def with_grad(tensors, grad):
    return {
        name: t.requires_grad_() if grad and t is not None and t.is_floating_point() else t
        for name, t in tensors.items()
    }


def ordered(tensors, without=()):
    return tuple(tensors[name] for name in NAMES if name not in without)


@needs_torch_2_4
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_opcheck(grad, device):
    ops = torch.ops.mamba_ssm
    for tensors, states in ((full(device, grad), True), (lean(device, grad), False)):
        torch.library.opcheck(ops.ssd.default, (*ordered(tensors), *OPTIONS, states))
        if grad:
            continue
        final = tensors["initial_states"]
        arguments = (tensors["x"], final, *ordered(tensors, without=["z"]), *OPTIONS, states)
        torch.library.opcheck(ops.ssd_backward.default, arguments)
    if not grad:
        tensors = SsdCase(1, 70, 4, 20, initial_states=True).inputs(torch.float32, device)
        bounds = torch.tensor([0, 20, 70], dtype=torch.int32, device=device)
        without = ["D", "z", "seq_idx"]
        torch.library.opcheck(ops.ssd_varlen_states.default, (*ordered(tensors, without), bounds, *OPTIONS))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, dynamic, device, request):
    if backend == "inductor":
        request.getfixturevalue("needs_inductor")

    def run(**t):
        out, states = mamba_chunk_scan_combined(**t, chunk_size=64, dt_softplus=True, return_final_states=True)
        return out * 2, states + 1

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)
    for seqlen in (70, 150) if dynamic else (150,):  # with fixed sizes each is compiled anew
        tensors = SsdCase(2, seqlen, 4, 20, z=True, initial_states=True).inputs(torch.float32, device)
        expected = outputs_and_gradients(run, tensors)
        for name, value in outputs_and_gradients(compiled, tensors).items():
            torch.testing.assert_close(value, expected[name], **CLOSE)


def test_compile_packed(device):
    def run(bounds, **t):
        out, states = mamba_chunk_scan_combined(**t, chunk_size=64, cu_seqlens=bounds, return_varlen_states=True)
        return out * 2, states + 1

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    tensors = SsdCase(1, 70, 4, 20).inputs(torch.float32, device)
    bounds = torch.tensor([0, 20, 70], dtype=torch.int32, device=device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(bounds, **tensors), run(bounds, **tensors), **CLOSE)


def test_batched_gradients(device):
    """is_grads_batched hides a dimension of the gradients from the operator."""
    tensors = full(device, grad=True)
    leaves = [t for t in tensors.values() if t.requires_grad]
    out = mamba_chunk_scan_combined(**tensors, chunk_size=64)
    directions = torch.randn(3, *out.shape, device=device)
    batched = torch.autograd.grad(out, leaves, directions, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(out, leaves, directions[i], retain_graph=True)
        torch.testing.assert_close([grad[i] for grad in batched], list(one), **CLOSE)


def test_mixed_dtypes_under_autocast(device):
    tensors = full(device)
    narrow = {**tensors, "x": tensors["x"].bfloat16()}
    same = {name: tensor.bfloat16() if name in ("B", "C", "z") else tensor for name, tensor in narrow.items()}
    options = {"chunk_size": 64, "dt_softplus": True}
    with torch.autocast(device, dtype=torch.bfloat16):
        out = mamba_chunk_scan_combined(**narrow, **options)
    assert out.dtype == torch.bfloat16 and torch.equal(out, mamba_chunk_scan_combined(**same, **options))
    with pytest.raises(TypeError, match="must have the dtype of x, bfloat16, got float32"):
        mamba_chunk_scan_combined(**narrow, **options)


def test_inference_mode_and_checkpoint(device):
    with torch.inference_mode():
        assert mamba_chunk_scan_combined(**lean(device), chunk_size=64).is_inference()
    tensors = full(device)

    def run(**t):
        return mamba_chunk_scan_combined(**t, chunk_size=64)

    def recomputed(**t):
        return torch.utils.checkpoint.checkpoint(lambda x: run(**{**t, "x": x}), t["x"], use_reentrant=False)

    expected = outputs_and_gradients(run, tensors)
    for name, value in outputs_and_gradients(recomputed, tensors).items():
        torch.testing.assert_close(value, expected[name])


def test_meta_tensors_give_shapes():
    out, states = mamba_chunk_scan_combined(**full("meta"), chunk_size=64, return_final_states=True)
    assert out.shape == (2, 70, 4, 20)
    assert states.shape == (2, 4, 20, 16)


@pytest.mark.gpu
def test_cuda_graph_and_side_streams(cuda):
    tensors = full(cuda)
    run = {"chunk_size": 64, "return_final_states": True}
    expected = mamba_chunk_scan_combined(**tensors, **run)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = mamba_chunk_scan_combined(**tensors, **run)
    stream.synchronize()
    torch.testing.assert_close(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = mamba_chunk_scan_combined(**tensors, **run)
    tensors["x"].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(results, mamba_chunk_scan_combined(**tensors, **run))


# ---- wrong arguments -------------------------------------------------------------------------------------------------

ERRORS = [
    ("x", lambda t: t.double(), TypeError, "x must be float32, float16 or bfloat16, got float64"),
    ("x", lambda t: t[0], ValueError, r"x must have 4 dimensions \(B, L, H, P\), got shape \(20, 4, 6\)"),
    ("x", lambda t: t.repeat(1, 1, 1, 50), ValueError, r"headdim must lie in 1\.\.256, got 300"),
    ("x", lambda t: t[..., :0], ValueError, r"headdim must lie in 1\.\.256, got 0"),
    ("dt", lambda t: t[:, :-1], ValueError, r"dt must have shape \(B, L, H\) = \(2, 20, 4\), got \(2, 19, 4\)"),
    ("dt", lambda t: t.double(), TypeError, "dt must be float32, float16 or bfloat16, got float64"),
    ("A", lambda t: t.to(torch.complex64), TypeError, "A must be a real float32 tensor, got complex64"),
    ("A", lambda t: t[:, None], ValueError, r"A must have shape \(H,\) = \(4,\), got \(4, 1\)"),
    ("B", lambda t: t.half(), TypeError, "B must have the dtype of x, float32, got float16"),
    ("B", lambda t: t[:, :, 0], ValueError, r"B must have 4 dimensions \(B, L, G, N\)"),
    (
        "B",
        lambda t: t[:, :-1],
        ValueError,
        r"B must have shape \(B, L, G, N\) = \(2, 20, 2, 16\), got \(2, 19, 2, 16\)",
    ),
    ("B", lambda t: t.repeat(1, 1, 1, 17), ValueError, r"dstate must lie in 1\.\.256, got 272"),
    ("B", lambda t: t[..., :0], ValueError, r"dstate must lie in 1\.\.256, got 0"),
    (
        "B",
        lambda t: t[:, :, [0, 1, 0]],
        ValueError,
        r"nheads .*must be a multiple of the number of groups.*got 3 groups",
    ),
    (
        "C",
        lambda t: t[..., 1:],
        ValueError,
        r"C must have shape \(B, L, G, N\) = \(2, 20, 2, 16\), got \(2, 20, 2, 15\)",
    ),
    ("C", lambda t: t.bfloat16(), TypeError, "C must have the dtype of x, float32, got bfloat16"),
    ("D", lambda t: t[:, 1:], ValueError, r"D must have shape \(H, P\) = \(4, 6\), got \(4, 5\)"),
    ("D", lambda t: t[0], ValueError, r"D must have shape \(H,\) = \(4,\), got \(6,\)"),
    ("z", lambda t: t[:, :, :1], ValueError, r"z must have shape \(B, L, H, P\)"),
    ("dt_bias", lambda t: t.double(), TypeError, "dt_bias must be float32, got float64"),
    ("initial_states", lambda t: t[:1], ValueError, r"initial_states must have shape \(B, H, P, N\) = \(2, 4, 6, 16\)"),
    ("seq_idx", lambda t: t.long(), TypeError, "seq_idx must be int32, got int64"),
    ("seq_idx", lambda t: t[:, 1:], ValueError, r"seq_idx must have shape \(B, L\) = \(2, 20\), got \(2, 19\)"),
]


def small(device):
    case = SsdCase(2, 20, 4, 6, groups=2, D="dim", z=True, initial_states=True, seq_idx=True)
    return case.inputs(torch.float32, device)


@pytest.mark.parametrize("name,spoil,error,message", ERRORS, ids=[row[0] + "-" + row[3][:30] for row in ERRORS])
def test_wrong_tensors(name, spoil, error, message, device):
    tensors = small(device)
    mamba_chunk_scan_combined(**tensors, chunk_size=64)
    tensors[name] = spoil(tensors[name])
    with pytest.raises(error, match=message):
        mamba_chunk_scan_combined(**tensors, chunk_size=64)
    with pytest.raises(error, match=message):
        torch.ops.mamba_ssm.ssd(*ordered(tensors), *OPTIONS, True)


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be a positive integer, got 0"),
        ({"chunk_size": 64.0}, TypeError, r"chunk_size must be a positive integer, got 64\.0"),
        ({"dt_limit": (0.5, 0.1)}, ValueError, r"dt_limit must be \(smallest, largest\), got \(0\.5, 0\.1\)"),
        ({"dt_limit": (0.0, float("nan"))}, ValueError, "dt_limit must be"),
        ({"dt_limit": ("0", "1")}, ValueError, r"dt_limit must be \(smallest, largest\), got \('0', '1'\)"),
        ({"dt_limit": 0.5}, ValueError, r"dt_limit must be \(smallest, largest\), got 0\.5"),
        ({"state_dtype": torch.int32}, TypeError, r"state_dtype must be a floating-point torch\.dtype or None"),
        ({"return_varlen_states": True}, ValueError, "return_varlen_states needs cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 20], dtype=torch.int32)}, ValueError, "x must have batch 1, got 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_wrong_options(options, error, message, device):
    tensors = small(device)
    with pytest.raises(error, match=message):
        mamba_chunk_scan_combined(**tensors, **{"chunk_size": 64, **options})


@pytest.mark.parametrize(
    "bounds,error,message",
    [
        (torch.tensor([0, 20]), TypeError, "cu_seqlens must be int32, got int64"),
        (torch.tensor([[0, 20]], dtype=torch.int32), ValueError, "cu_seqlens must have 1 dimensions"),
        (torch.tensor([], dtype=torch.int32), ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\)"),
    ],
)
def test_wrong_cu_seqlens(bounds, error, message, device):
    tensors = SsdCase(1, 20, 4, 6).inputs(torch.float32, device)
    with pytest.raises(error, match=message):
        mamba_chunk_scan_combined(**tensors, chunk_size=64, cu_seqlens=bounds.to(device))


def test_wrong_tensors_in_the_backward_operator(device):
    tensors = small(device)
    good = {"dout": tensors["x"], "dfinal_states": tensors["initial_states"]}

    def backward(**changes):
        given = {**good, **changes}
        return torch.ops.mamba_ssm.ssd_backward(
            given["dout"], given["dfinal_states"], *ordered(tensors, without=["z"]), *OPTIONS, True
        )

    backward()
    with pytest.raises(TypeError, match="dout must have the dtype of x"):
        backward(dout=tensors["x"].half())
    with pytest.raises(ValueError, match=r"dout must have shape \(B, L, H, P\)"):
        backward(dout=tensors["x"][:1])
    with pytest.raises(ValueError, match=r"dfinal_states must have shape \(B, H, P, N\)"):
        backward(dfinal_states=tensors["initial_states"][..., 1:])


@pytest.mark.gpu
def test_mixed_devices(cuda):
    tensors = small(cuda)
    for name in NAMES[1:]:
        with pytest.raises(ValueError, match=f"{name} must be on cuda:0 like x, got cpu"):
            mamba_chunk_scan_combined(**{**tensors, name: tensors[name].cpu()}, chunk_size=64)
