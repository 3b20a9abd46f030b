"""mamba_inner_fn against its reference: every optional argument, both checkpoint levels, autocast."""

import contextlib

import pytest
import torch
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id, outputs_and_gradients
from _helpers.mamba_inner_inputs import D_MODEL, DIM, inputs
from torch.utils._python_dispatch import TorchDispatchMode

from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, mamba_inner_ref
from mamba_ssm.utils.reference import plain_torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

OPTIONS = [
    {},
    {"batch": 1, "seqlen": 1},
    {"batch": 1, "seqlen": 130},
    {"batch": 3, "seqlen": 128},  # rows that a GPU reads and writes as vectors
    {"batch": 1, "seqlen": 1032},  # long enough to be split on a GPU
    {"bias": False},
    {"B": "constant"},
    {"C": "constant"},
    {"B": "constant", "C": "constant"},
    {"B": "given"},
    {"proj_bias": True},
    {"rms": True},
    {"rms": True, "proj_bias": True, "batch": 3, "seqlen": 20},
]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options, level, device):
    tensors = inputs(torch.float32, device, **options)
    found = outputs_and_gradients(lambda **t: mamba_inner_fn(**t, checkpoint_lvl=level), tensors)
    plain = outputs_and_gradients(mamba_inner_ref, tensors)
    truth = outputs_and_gradients(mamba_inner_ref, tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)


@pytest.mark.parametrize("seqlen", [71, 128])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_low_precision(dtype, seqlen, device):
    tensors = inputs(dtype, device, seqlen=seqlen)
    found = outputs_and_gradients(mamba_inner_fn, tensors)
    plain = outputs_and_gradients(mamba_inner_ref, tensors)
    truth = outputs_and_gradients(mamba_inner_ref, tensors, torch.float64)
    # intermediate results are rounded at other places than in the reference: a few roundings of the largest value
    assert_close_to_truth(found, plain, truth, atol=4 * torch.finfo(dtype).eps)


def test_layouts_of_xz(device):
    tensors = inputs(torch.float32, device)
    expected = outputs_and_gradients(mamba_inner_fn, tensors)
    for dims in ((1, 0), (2, 1)):
        other = {**tensors, "xz": tensors["xz"].transpose(*dims).contiguous().transpose(*dims)}
        for name, value in outputs_and_gradients(mamba_inner_fn, other).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


def test_levels_agree_and_no_grad_agrees(device):
    tensors = inputs(torch.float32, device)
    with torch.no_grad():
        expected = mamba_inner_fn(**tensors)
    for level in (0, 1):
        out = outputs_and_gradients(lambda level=level, **t: mamba_inner_fn(**t, checkpoint_lvl=level), tensors)["out0"]
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_level_1_saves_less(device):
    sizes = []
    for level in (0, 1):
        tensors = {
            name: None if tensor is None else tensor.requires_grad_()
            for name, tensor in inputs(torch.float32, device).items()
        }
        total = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, total=total: total.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            mamba_inner_fn(**tensors, checkpoint_lvl=level)
        sizes.append(sum(total))
    assert sizes[0] - sizes[1] == 2 * 2 * DIM * 71  # conv output and delta


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
def test_autocast(backward_inside, device):
    tensors = {
        name: None if tensor is None else tensor.requires_grad_()
        for name, tensor in inputs(torch.float32, device).items()
    }
    grads = []
    for cast in (True, False):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
            if cast:
                out = mamba_inner_fn(**tensors)
                if backward_inside:
                    out.float().sum().backward()
            else:
                names = ("xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias")
                narrow = {name: tensors[name].bfloat16() for name in names}
                out = mamba_inner_fn(**{**tensors, **narrow})
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


def test_backward_under_autocast_of_a_float32_forward(device):
    tensors = {
        name: None if tensor is None else tensor.requires_grad_()
        for name, tensor in inputs(torch.float32, device).items()
    }
    leaves = [tensor for tensor in tensors.values() if tensor is not None]
    expected = torch.autograd.grad(mamba_inner_fn(**tensors).sum(), leaves)
    out = mamba_inner_fn(**tensors)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("B", ["constant", "given"])
def test_given_matrices_under_autocast(B, device):
    """A variable B is an activation, a constant one a parameter that stays float32."""
    tensors = inputs(torch.float32, device, B=B)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = mamba_inner_fn(**tensors)
    names = ["xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias"]
    names += ["B"] if B == "given" else []
    assert torch.equal(found, mamba_inner_fn(**{**tensors, **{name: tensors[name].bfloat16() for name in names}}))


def test_bias_of_another_dtype(device):
    tensors = inputs(torch.bfloat16, device)
    expected = mamba_inner_fn(**tensors)
    assert torch.equal(mamba_inner_fn(**{**tensors, "out_proj_bias": tensors["out_proj_bias"].float()}), expected)


@pytest.mark.parametrize("rms", [False, True], ids=["plain", "rms"])
@pytest.mark.parametrize("empty", ["batch", "seqlen"])
def test_empty(empty, rms, device):
    tensors = inputs(torch.float32, device, rms=rms, proj_bias=rms, **{empty: 0})
    found = outputs_and_gradients(mamba_inner_fn, tensors)
    assert found.pop("out0").numel() == found.pop("dxz").numel() == 0
    assert found.keys() == {"d" + name for name, tensor in tensors.items() if tensor is not None and name != "xz"}
    assert not any(grad.any() for grad in found.values())


def test_deterministic(device):
    tensors = {
        name: None if tensor is None else tensor.requires_grad_()
        for name, tensor in inputs(torch.float32, device, seqlen=130).items()
    }
    leaves = [tensor for tensor in tensors.values() if tensor is not None]
    expected = torch.autograd.grad(mamba_inner_fn(**tensors).square().sum(), leaves)
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS would want a variable of the environment
    try:
        first, second = (torch.autograd.grad(mamba_inner_fn(**tensors).square().sum(), leaves) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Watched(TorchDispatchMode):
    """Sees every operator as it is dispatched, and lets it be."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 1, "bias": False, "B": "constant"}, {"C": "given"}, {"rms": True, "proj_bias": True}, {"seqlen": 0}],
    ids=str,
)
@pytest.mark.parametrize("level", [0, 1])
def test_same_bits_with_and_without_operators(level, options, device, kernels):
    """Calls go past the dispatcher where nothing needs it."""
    tensors = inputs(torch.float32, device, **options)
    results = []
    for mode in (contextlib.nullcontext(), Watched()):
        with mode:
            results.append(outputs_and_gradients(lambda **t: mamba_inner_fn(**t, checkpoint_lvl=level), tensors))
        with mode, torch.no_grad():
            results[-1]["no_grad"] = mamba_inner_fn(**tensors)
    for name, found in results[0].items():
        if kernels == "cpu" or not name.startswith("d"):
            assert torch.equal(found, results[1][name]), name
        else:  # gradients that blocks add up with atomics differ from run to run
            torch.testing.assert_close(found, results[1][name], rtol=1e-4, atol=1e-4)


def test_expanded_gradient(device):
    """The gradient of a sum has stride 0 everywhere."""
    tensors = inputs(torch.float32, device)
    xz = tensors.pop("xz").requires_grad_()
    out = mamba_inner_fn(xz, **tensors)
    (expected,) = torch.autograd.grad(out, xz, torch.ones_like(out), retain_graph=True)
    (found,) = torch.autograd.grad(out.sum(), xz)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def backward_arguments(device, level, **options):
    """What forward hands to the backward operator, with a gradient in front."""
    tensors = {
        name: None if tensor is None else tensor.requires_grad_()
        for name, tensor in inputs(torch.float32, device, seqlen=9, **options).items()
    }
    out = mamba_inner_fn(**tensors, checkpoint_lvl=level)
    saved = (None if tensor is None else tensor.detach() for tensor in out.grad_fn.saved_tensors)
    return torch.randn_like(out), *saved, True, 1e-6, level


@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False, "B": "constant"}, {"B": "given"}, {"rms": True, "proj_bias": True}], ids=str
)
def test_opcheck_of_backward(options, level, device):
    op = torch.ops.mamba_ssm.mamba_inner_backward.default
    torch.library.opcheck(op, backward_arguments(device, level, **options))


@pytest.mark.skipif(TORCH < (2, 4), reason="torch before 2.4 has no opcheck")
@pytest.mark.parametrize("keep", [False, True], ids=["inference", "keep"])
@pytest.mark.parametrize("options", [{}, {"bias": False, "B": "constant"}, {"rms": True, "proj_bias": True}], ids=str)
def test_opcheck(options, keep, device):
    tensors = [
        None if tensor is None else tensor.requires_grad_()
        for tensor in inputs(torch.float32, device, seqlen=9, **options).values()
    ]
    # two floats of what is kept have no value, so that it differs from run to run
    checked = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")} if keep else {}
    torch.library.opcheck(torch.ops.mamba_ssm.mamba_inner.default, (*tensors, True, 1e-6, 0, keep), **checked)


def test_backward_operator_checks_its_arguments(device):
    op = torch.ops.mamba_ssm.mamba_inner_backward
    dout, xz, *rest, x_dbl, checkpoints, conv_out, delta, softplus, eps, level = backward_arguments(device, 0)
    with pytest.raises(ValueError, match=r"dout must have shape \(B, L, d_model\) = \(2, 9, 12\)"):
        op(dout[:1], xz, *rest, x_dbl, checkpoints, conv_out, delta, softplus, eps, level)
    with pytest.raises(ValueError, match=r"x_dbl must have shape .* = \(13, 18\), got \(12, 18\)"):
        op(dout, xz, *rest, x_dbl[1:], checkpoints, conv_out, delta, softplus, eps, level)
    with pytest.raises(ValueError, match="conv_out and delta go together"):
        op(dout, xz, *rest, x_dbl, checkpoints, conv_out, None, softplus, eps, level)
    with pytest.raises(TypeError, match="conv_out must have the dtype of xz, float32, got float16"):
        op(dout, xz, *rest, x_dbl, checkpoints, conv_out.half(), delta, softplus, eps, level)
    with pytest.raises(ValueError, match="delta must have shape"):
        op(dout, xz, *rest, x_dbl, checkpoints, conv_out, delta[..., 1:], softplus, eps, level)


@pytest.mark.parametrize("reverse", [False, True])
def test_second_derivatives(reverse, device):
    tensors = inputs(torch.float32, device, seqlen=9, proj_bias=True, rms=True)

    def second(tensors):
        tensors = {name: tensor if tensor is None else tensor.detach() for name, tensor in tensors.items()}
        leaves = [tensor.requires_grad_() for tensor in tensors.values() if tensor is not None]
        first = torch.autograd.grad(
            mamba_inner_fn(**tensors, reverse=reverse).square().sum(), leaves, create_graph=True
        )
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    found = second(tensors)
    with plain_torch():
        expected = second({name: tensor if tensor is None else tensor.double() for name, tensor in tensors.items()})
    for one, other in zip(found, expected, strict=True):  # sums of squares of sums in float32
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_clear_errors(device):
    tensors = inputs(torch.float32, device)
    with pytest.raises(ValueError, match=r"checkpoint_lvl must be 0 or 1, got 2"):
        mamba_inner_fn(**tensors, checkpoint_lvl=2)
    with pytest.raises(ValueError, match=r"x_proj_weight must have shape .*got \(12, 24\)"):
        mamba_inner_fn(**{**tensors, "x_proj_weight": tensors["x_proj_weight"][1:]})
    with pytest.raises(TypeError, match="out_proj_weight must have the dtype of xz, float32, got float16"):
        mamba_inner_fn(**{**tensors, "out_proj_weight": tensors["out_proj_weight"].half()})
    with pytest.raises(TypeError, match="A must be a real float32 tensor, got complex64"):
        mamba_inner_fn(**{**tensors, "A": tensors["A"].to(torch.complex64)})
    with pytest.raises(TypeError, match="out_proj_bias must have the dtype of xz, float32, got int64"):
        mamba_inner_fn(**{**tensors, "out_proj_bias": tensors["out_proj_bias"].long()})
    for name, size in (
        ("B_proj_bias", 5),
        ("C_proj_bias", 5),
        ("b_rms_weight", 5),
        ("c_rms_weight", 5),
        ("dt_rms_weight", 24),
    ):
        good = torch.ones(size, device=device)
        for spoiled, error, message in (
            (good[:1], ValueError, rf"{name} must have shape \(.,\) = \({size},\), got \(1,\)"),
            (good.to(torch.complex64), TypeError, f"{name} must be float32, float16 or bfloat16, got complex64"),
            ([1.0] * size, TypeError, rf"{name} must be a torch\.Tensor, got list"),
        ):
            with pytest.raises(error, match=message):
                mamba_inner_fn(**{**tensors, name: spoiled})
    for name, spoiled, message in (
        ("D", 1.0, r"D must be a torch\.Tensor, got float"),
        ("delta_bias", 2.0, r"delta_bias must be a torch\.Tensor, got float"),
        ("conv1d_bias", "x", r"conv1d_bias must be a torch\.Tensor, got str"),
        ("D", tensors["D"].to_sparse(), r"D must be a dense tensor, got torch\.sparse_coo"),
        ("xz", tensors["xz"].to_sparse(), r"xz must be a dense tensor, got torch\.sparse_coo"),
    ):
        with pytest.raises(TypeError, match=message):
            mamba_inner_fn(**{**tensors, name: spoiled})
    given = inputs(torch.float32, device, C="given")
    for name in ("C_proj_bias", "c_rms_weight"):
        with pytest.raises(ValueError, match=f"{name} is for what x_proj gives, but C is given"):
            mamba_inner_fn(**{**given, name: torch.ones(5, device=device)})


def test_meta_tensors_give_shapes():
    out = mamba_inner_fn(**inputs(torch.float32, "meta"))
    assert (out.shape, out.device.type) == ((2, 71, D_MODEL), "meta")
