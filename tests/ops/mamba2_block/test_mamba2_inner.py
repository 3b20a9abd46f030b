"""mamba_split_conv1d_scan_combined against its reference: every optional argument, autocast, compilers, memory."""

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id, fixed_sum, outputs_and_gradients
from _helpers.mamba2_inner_inputs import DIM, DSTATE, HEADDIM, HEADS, inputs

from mamba_ssm.ops.triton.ssd_combined import (
    mamba_conv1d_scan_ref,
    mamba_split_conv1d_scan_combined,
    mamba_split_conv1d_scan_ref,
)
from mamba_ssm.utils.reference import plain_torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

OPTIONS = [
    ({}, {}),
    ({"batch": 1, "seqlen": 1}, {"norm_before_gate": False}),
    ({"batch": 1, "seqlen": 130, "ngroups": 2}, {"norm_before_gate": False, "dt_limit": (0.1, 0.3)}),
    ({"bias": False, "D": None}, {"activation": None}),
    ({"norm": False, "D": "full"}, {"return_final_states": True}),
    ({"norm": False, "seqlen": 5}, {"rmsnorm_eps": None}),  # as transformers hands it on
    ({"norm": False, "project": False, "seqlen": 20}, {}),
    ({"project": False, "d_mlp": 3, "initial_states": True}, {"return_final_states": True}),
    ({"d_mlp": 5, "ngroups": 4, "seq_idx": True}, {"norm_before_gate": False}),
    ({"d_mlp": 5, "norm": False, "seq_idx": True}, {}),
    ({"initial_states": True, "D": "full"}, {"return_final_states": True, "rmsnorm_eps": 0.1}),
]


@pytest.mark.parametrize("options,rest", OPTIONS, ids=str)
def test_values_and_gradients(options, rest, device):
    tensors, fixed = inputs(torch.float32, device, **options)
    found = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_combined(**t, **fixed, **rest), tensors)
    plain = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_ref(**t, **fixed, **rest), tensors)
    truth = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_ref(**t, **fixed, **rest), tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)
    with torch.no_grad():
        out = mamba_split_conv1d_scan_combined(**tensors, **fixed, **rest)
    torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, found["out0"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"norm": False, "d_mlp": 4}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_low_precision(dtype, options, device):
    tensors, fixed = inputs(dtype, device, **options)
    found = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_combined(**t, **fixed), tensors)
    plain = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_ref(**t, **fixed), tensors)
    truth = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_ref(**t, **fixed), tensors, torch.float64)
    # intermediate results are rounded at other places than in the reference: a few roundings of the largest value
    assert_close_to_truth(found, plain, truth, atol=4 * torch.finfo(dtype).eps)


def test_layouts_of_zxbcdt(device):
    tensors, fixed = inputs(torch.float32, device)
    expected = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_combined(**t, **fixed), tensors)
    wide = torch.zeros(2, 71, tensors["zxbcdt"].shape[-1] + 3, device=device)
    wide[:, :, 1:-2] = tensors["zxbcdt"]
    for zxbcdt in (
        tensors["zxbcdt"].transpose(0, 1).contiguous().transpose(0, 1),
        tensors["zxbcdt"].transpose(1, 2).contiguous().transpose(1, 2),
        wide[:, :, 1:-2],
    ):
        found = outputs_and_gradients(
            lambda zxbcdt, **t: mamba_split_conv1d_scan_combined(zxbcdt, **t, **fixed), {**tensors, "zxbcdt": zxbcdt}
        )
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


def test_one_row_for_the_whole_batch(device):
    """zxbcdt, and the gradient of the output, with stride 0."""
    tensors, fixed = inputs(torch.float32, device, batch=1, d_mlp=2)

    def run(function, batch):
        leaves = {name: None if t is None else t.detach().clone().requires_grad_() for name, t in tensors.items()}
        out = function(**{**leaves, "zxbcdt": batch(leaves["zxbcdt"])}, **fixed)
        return torch.autograd.grad(out.sum(), [t for t in leaves.values() if t is not None])

    found = run(mamba_split_conv1d_scan_combined, lambda row: row.expand(3, -1, -1))
    expected = run(mamba_split_conv1d_scan_ref, lambda row: row.repeat(3, 1, 1))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
@pytest.mark.parametrize("project", [True, False], ids=["project", "no_project"])
def test_what_is_kept(project, norm, device):
    tensors, fixed = inputs(torch.float32, device, norm=norm, project=project)
    for tensor in tensors.values():
        if tensor is not None:
            tensor.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mamba_split_conv1d_scan_combined(**tensors, **fixed)
    given = {tensor.data_ptr() for tensor in tensors.values() if tensor is not None}
    new = sorted(tensor.numel() for tensor in kept if tensor.data_ptr() not in given)
    assert new == ([2 * 71, 2 * 71 * DIM] if norm else [])  # 1 / rms, and the scan's output


def test_gradients_of_some(device):
    tensors, fixed = inputs(torch.float32, device, initial_states=True)
    names = ["A", "outproj_bias"]
    every = outputs_and_gradients(lambda **t: mamba_split_conv1d_scan_combined(**t, **fixed), tensors)
    leaves = {name: tensors[name].clone().requires_grad_() for name in names}
    out = mamba_split_conv1d_scan_combined(**{**tensors, **leaves}, **fixed)
    for name, grad in zip(names, torch.autograd.grad(fixed_sum(out), list(leaves.values())), strict=True):
        torch.testing.assert_close(grad, every[f"d{name}"])


@pytest.mark.parametrize("project", [True, False], ids=["project", "no_project"])
def test_gradient_of_final_states_alone(project, device):
    tensors, fixed = inputs(torch.float32, device, project=project)
    grads = []
    for function in (mamba_split_conv1d_scan_combined, mamba_split_conv1d_scan_ref):
        zxbcdt = tensors["zxbcdt"].clone().requires_grad_()
        states = function(**{**tensors, "zxbcdt": zxbcdt}, **fixed, return_final_states=True)[1]
        grads.extend(torch.autograd.grad(states.square().sum(), zxbcdt))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
def test_autocast(backward_inside, device):
    tensors, fixed = inputs(torch.float32, device)
    tensors = {name: None if tensor is None else tensor.requires_grad_() for name, tensor in tensors.items()}
    grads = []
    for cast in (True, False):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
            if cast:
                out = mamba_split_conv1d_scan_combined(**tensors, **fixed)
                if backward_inside:
                    out.float().sum().backward()
            else:
                names = ("zxbcdt", "outproj_weight", "outproj_bias")
                narrow = {name: tensors[name].bfloat16() for name in names}
                out = mamba_split_conv1d_scan_combined(**{**tensors, **narrow}, **fixed)
        assert out.dtype == torch.bfloat16
        if not (cast and backward_inside):
            out.float().sum().backward()
        grads.append({name: tensor.grad for name, tensor in tensors.items() if tensor is not None})
        for tensor in tensors.values():
            if tensor is not None:
                tensor.grad = None
    for name, grad in grads[0].items():
        assert grad.dtype == torch.float32, name
        assert torch.equal(grad, grads[1][name]), name


def test_narrow_parameters_and_states(device):
    tensors, fixed = inputs(torch.bfloat16, device, initial_states=True)
    for name in ("A", "D", "dt_bias", "initial_states"):
        tensors[name] = tensors[name].bfloat16()
    wide = {name: t.float() if name in ("A", "D", "dt_bias", "initial_states") else t for name, t in tensors.items()}
    wide["outproj_bias"] = wide["outproj_bias"].float()
    expected = mamba_split_conv1d_scan_combined(**wide, **fixed, return_final_states=True)
    found = mamba_split_conv1d_scan_combined(**tensors, **fixed, return_final_states=True, state_dtype=torch.bfloat16)
    assert torch.equal(found[0], expected[0]) and expected[1].dtype == torch.float32
    assert torch.equal(found[1], expected[1].bfloat16())


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen": 0}], ids=str)
@pytest.mark.parametrize("options", [{}, {"norm": False, "d_mlp": 2}], ids=str)
def test_empty(shape, options, device):
    tensors, fixed = inputs(torch.float32, device, **shape, **options)
    found = outputs_and_gradients(
        lambda **t: mamba_split_conv1d_scan_combined(**t, **fixed, return_final_states=True), tensors
    )
    assert found["out0"].numel() == 0 and found["out1"].eq(0).all()
    assert all(grad.eq(0).all() for name, grad in found.items() if name.startswith("d"))


def test_nan_stays_in_its_row(device, kernels):
    """On the CPU also behind its step; on CUDA behind its tile's first, since tensor cores multiply masked zeros."""
    tensors, fixed = inputs(torch.float32, device, seqlen=150)
    expected = mamba_split_conv1d_scan_combined(**tensors, **fixed)
    tensors["zxbcdt"][0, 75] = torch.nan
    found = mamba_split_conv1d_scan_combined(**tensors, **fixed)
    assert found[0, 75:].isnan().any(-1).all()
    untouched = 75 if kernels == "cpu" else 64  # tiles begin at multiples of at most 64 steps
    torch.testing.assert_close(found[0, :untouched], expected[0, :untouched])
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static_inductor", "dynamic_aot_eager"])
def test_compile(dynamic, device, request):
    if not dynamic:
        request.getfixturevalue("needs_inductor")
    _, fixed = inputs(torch.float32, device)

    def run(**t):
        out, states = mamba_split_conv1d_scan_combined(**t, **fixed, return_final_states=True)
        return out * 2, states + 1

    compiled = torch.compile(run, backend="aot_eager" if dynamic else "inductor", fullgraph=True, dynamic=dynamic)
    for seqlen in (30, 60) if dynamic else (60,):  # with fixed sizes each is compiled anew
        tensors, _ = inputs(torch.float32, device, seqlen=seqlen, d_mlp=2, initial_states=True)
        expected = outputs_and_gradients(run, tensors)
        for name, value in outputs_and_gradients(compiled, tensors).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
@pytest.mark.parametrize("A_is_log", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm": False, "d_mlp": 3, "bias": False, "D": None}], ids=str)
def test_opcheck(options, A_is_log, device):
    op = torch.ops.mamba_ssm
    tensors, _ = inputs(torch.float32, device, seqlen=9, initial_states=True, **options)
    if A_is_log:
        tensors["A"] = tensors["A"].neg().log().bfloat16()
    first = list(tensors.values())[:9]
    rest = (HEADDIM, 1, 0.0, 1.0, True, 1e-5, False, A_is_log)
    torch.library.opcheck(op.split_conv1d_scan.default, (*first, *rest, True, True))
    out, y, rstd, states = op.split_conv1d_scan(*first, *rest, True, True)
    torch.library.opcheck(op.split_conv1d_scan_backward.default, (out, states, y, rstd, *first, *rest, True, True))
    wanted = [tensor if tensor is None else tensor.requires_grad_() for tensor in first]
    torch.library.opcheck(op.split_conv1d_scan.default, (*wanted, *rest, True, False))


@pytest.mark.parametrize("project", [False, True])
def test_second_derivatives(project, device):
    tensors, fixed = inputs(torch.float32, device, seqlen=9, project=project)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def second(tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
        out = mamba_split_conv1d_scan_combined(**dict(zip(tensors, leaves, strict=True)), **fixed)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    found = second(tensors)
    with plain_torch():
        expected = second({name: tensor.double() for name, tensor in tensors.items()})
    for one, other in zip(found, expected, strict=True):  # sums of squares of sums in float32
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_conv1d_scan_ref():
    tensors, fixed = inputs(torch.float32, "cpu", norm=False, project=False)
    d_z, channels = DIM, DIM + 2 * DSTATE
    z, xBC, dt = tensors["zxbcdt"].split([d_z, channels, HEADS], dim=-1)
    names = ("conv1d_weight", "conv1d_bias", "A", "D", "dt_bias")
    out = mamba_conv1d_scan_ref(xBC, dt=dt, z=z, dt_softplus=True, **{n: tensors[n] for n in names}, **fixed)
    torch.testing.assert_close(out, mamba_split_conv1d_scan_combined(**tensors, **fixed), rtol=1e-4, atol=1e-4)


def test_clear_errors(device):
    tensors, fixed = inputs(torch.float32, device)

    def raises(error, message, **changed):
        with pytest.raises(error, match=message):
            mamba_split_conv1d_scan_combined(**{**tensors, **fixed, **changed})

    raises(ValueError, "headdim must be given where D is not", headdim=None)
    raises(ValueError, r"headdim is 6, but D has shape \(H, P\) = \(4, 5\)", D=torch.ones(4, 5, device=device))
    raises(ValueError, r"conv1d_weight must have H P .* rows with H = 4, P = 9, G = 1, got 34", headdim=9)
    raises(ValueError, "must be a multiple of the number of groups of B and C, ngroups, got 3 groups", ngroups=3)
    raises(ValueError, "62 without d_mlp, got 61", zxbcdt=tensors["zxbcdt"][:, :, 1:])
    raises(ValueError, r"zxbcdt must have 3 dimensions .*, got shape \(71, 62\)", zxbcdt=tensors["zxbcdt"][0])
    raises(TypeError, "zxbcdt must be float32, float16 or bfloat16, got float64", zxbcdt=tensors["zxbcdt"].double())
    raises(ValueError, "chunk_size must be a positive integer, got 0", chunk_size=0)
    raises(ValueError, "activation must be None, 'silu' or 'swish', got 'gelu'", activation="gelu")
    raises(ValueError, r"outproj_weight must have shape .* = \(12, 24\), got \(12, 23\)",
           outproj_weight=tensors["outproj_weight"][:, 1:])  # fmt: skip
    raises(TypeError, "outproj_weight must have the dtype of zxbcdt, float32, got float16",
           outproj_weight=tensors["outproj_weight"].half())  # fmt: skip
    raises(ValueError, "outproj_bias is given, but outproj_weight is None", outproj_weight=None)
    raises(ValueError, r"rmsnorm_weight must have shape \(H P,\) = \(24,\), got \(23,\)",
           rmsnorm_weight=tensors["rmsnorm_weight"][1:])  # fmt: skip
    raises(ValueError, r"dt_bias must have shape \(H,\) = \(4,\), got \(3,\)", dt_bias=tensors["dt_bias"][1:])
    raises(ValueError, r"dt_limit must be \(smallest, largest\), got \(2.0, 1.0\)", dt_limit=(2.0, 1.0))
    seq_idx = torch.zeros(2, 71, dtype=torch.int64, device=device)
    raises(TypeError, "seq_idx must be int32, got int64", seq_idx=seq_idx)
    raises(TypeError, "outproj_bias must have the dtype of zxbcdt, float32, got int64",
           outproj_bias=tensors["outproj_bias"].long())  # fmt: skip
    raises(TypeError, "ngroups must be an integer, got 1.0", ngroups=1.0)
    raises(ValueError, r"conv1d_bias must have shape \(D,\) = \(34,\), got \(33,\)",
           conv1d_bias=tensors["conv1d_bias"][1:])  # fmt: skip
    raises(TypeError, "conv1d_weight must be float32, float16 or bfloat16, got float64",
           conv1d_weight=tensors["conv1d_weight"].double())  # fmt: skip
    raises(TypeError, "zxbcdt must be a torch.Tensor, got NoneType", zxbcdt=None)
    raises(TypeError, "rmsnorm_eps must be a number, got None", rmsnorm_eps=None)


def test_meta_tensors_give_shapes():
    tensors, fixed = inputs(torch.float32, "meta")
    out = mamba_split_conv1d_scan_combined(**tensors, **fixed)
    assert (out.shape, out.device.type) == ((2, 71, 12), "meta")
