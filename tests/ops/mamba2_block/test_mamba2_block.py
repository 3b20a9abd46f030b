"""mamba2_block, a Mamba-2 block in one autograd node, against its reference and the two nodes that it stands for."""

import re

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id, fixed_sum, output_and_kept, outputs_and_gradients
from _helpers.mamba2_inner_inputs import D_MODEL, HEADDIM, inputs

from mamba_ssm import Mamba2
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.ops.mamba2_block import BlockInputs, Options, mamba2_block, mamba_split_conv1d_scan_combined
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_ref

ALIKE = "conv1d_bias", "dt_bias", "D", "seq_idx", "rmsnorm_weight", "outproj_weight", "outproj_bias"


def block_inputs(dtype, device, narrow=False, **options):
    """Tensors of mamba2_block; narrow: A_log, D and dt_bias have the dtype of the rest, else float32."""
    inner, _ = inputs(dtype, device, **options)
    batch, seqlen, width = inner["zxbcdt"].shape
    parameters = {"A_log": torch.log(-inner["A"]), "D": inner["D"], "dt_bias": inner["dt_bias"]}
    return {
        "hidden_states": torch.randn(batch, seqlen, D_MODEL).to(device, dtype),
        "in_proj_weight": (torch.randn(width, D_MODEL) * D_MODEL**-0.5).to(device, dtype),
        "in_proj_bias": None if inner["conv1d_bias"] is None else torch.randn(width).to(device, dtype),
        "conv1d_weight": inner["conv1d_weight"][:, None],
        **{name: inner[name] for name in ALIKE},
        **{name: tensor.to(dtype) if narrow else tensor for name, tensor in parameters.items()},
    }


def block(ngroups=1, dt_limit=(0.0, float("inf")), norm_before_gate=False, **tensors):
    options = Options(HEADDIM, ngroups, *dt_limit, True, 1e-5, norm_before_gate, A_is_log=True)
    return mamba2_block(BlockInputs(**tensors), options)


def block_ref(
    hidden_states, in_proj_weight, in_proj_bias, conv1d_weight, A_log, fn=mamba_split_conv1d_scan_ref, **rest
):
    zxbcdt = F.linear(hidden_states, in_proj_weight, in_proj_bias)
    A = -torch.exp(A_log if A_log.dtype == torch.float64 else A_log.float())
    fixed = {"chunk_size": 64, "headdim": HEADDIM, "rmsnorm_eps": 1e-5, "norm_before_gate": False}
    return fn(zxbcdt, conv1d_weight.squeeze(1), A=A, **{**fixed, **rest})


def block_of_two_nodes(**tensors):
    """What mamba2_block stands for: the projection by torch, then mamba_split_conv1d_scan_combined."""
    return block_ref(**tensors, fn=mamba_split_conv1d_scan_combined)


def trainable(*arguments, **options):
    tensors = block_inputs(*arguments, **options)
    return {name: t if t is None or t.dtype == torch.int32 else t.requires_grad_() for name, t in tensors.items()}


def leaves_of(tensors):
    return [tensor for tensor in tensors.values() if tensor is not None and tensor.requires_grad]


@pytest.mark.parametrize(
    "options,rest",
    [
        ({}, {}),
        ({"batch": 1, "seqlen": 1}, {"norm_before_gate": True}),
        ({"batch": 1, "seqlen": 1032}, {}),
        ({"bias": False, "norm": False}, {"dt_limit": (0.1, 0.3)}),
        ({"ngroups": 2, "d_mlp": 5, "seq_idx": True}, {"ngroups": 2}),
    ],
    ids=str,
)
def test_values_and_gradients(options, rest, device):
    tensors = block_inputs(torch.float32, device, **options)
    found = outputs_and_gradients(lambda **t: block(**t, **rest), tensors)
    plain = outputs_and_gradients(lambda **t: block_ref(**t, **rest), tensors)
    truth = outputs_and_gradients(lambda **t: block_ref(**t, **rest), tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)
    with torch.no_grad():
        torch.testing.assert_close(block(**tensors, **rest), found["out0"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32_A", "narrow_A"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_low_precision(dtype, narrow, device):
    tensors = block_inputs(dtype, device, narrow=narrow)
    found = outputs_and_gradients(block, tensors)
    plain = outputs_and_gradients(block_ref, tensors)
    truth = outputs_and_gradients(block_ref, tensors, torch.float64)
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    assert {name: found["d" + name].dtype for name in given} == given
    # as for mamba_split_conv1d_scan_combined; the input projection's rounding comes on top
    assert_close_to_truth(found, plain, truth, atol=6 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen": 0}], ids=str)
def test_empty(shape, device):
    found = outputs_and_gradients(block, block_inputs(torch.float32, device, **shape))
    assert found["out0"].numel() == 0
    assert all(grad.eq(0).all() for name, grad in found.items() if name.startswith("d"))


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("options", [{}, {"rmsnorm": False, "bias": True, "D_has_hdim": True, "d_ssm": 32}], ids=str)
def test_module_is_what_two_nodes_are(options, cast, device):
    module = Mamba2(24, d_state=16, headdim=8, **options).to(device)
    x = torch.randn(2, 33, 24, device=device, requires_grad=True)
    results = []
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
            out = module(x)
        leaves = [x, *module.parameters()]
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast), torch.no_grad():
            results.append((out, module(x), *grads))
        module.in_proj.register_forward_hook(lambda *_: None)  # a projection with a hook is called
    assert results[0][0].grad_fn.name().startswith("mamba2_node")
    assert results[1][0].grad_fn.name().startswith("_Mamba2Inner")
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        # exp(A_log) of the kernels and of torch may differ in the last bit, which up to 33 steps add up, and in what is
        # rounded to bfloat16 behind it
        tolerance = 2e-2 if cast else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("trained", ["hidden_states", "in_proj_weight", "in_proj_bias", "A_log", "outproj_weight"])
def test_frozen_inputs(trained, device):
    tensors = block_inputs(torch.float32, device)
    expected = outputs_and_gradients(block_of_two_nodes, tensors)["d" + trained]
    leaf = tensors[trained].requires_grad_()
    out, kept = output_and_kept(block, tensors)
    (found,) = torch.autograd.grad(fixed_sum(out), leaf)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # a product keeps only what the gradient of its other side takes
    assert (tensors["hidden_states"].data_ptr() in kept) == (trained == "in_proj_weight")
    assert (tensors["in_proj_weight"].data_ptr() in kept) == (trained == "hidden_states")


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_keeps_no_more_than_two_nodes(cast, device):
    sizes = []
    for function in (block, block_of_two_nodes):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
            out, kept = output_and_kept(function, trainable(torch.float32, device))
        sizes.append(sum(kept.values()))
        del out
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
def test_autocast(backward_inside, device):
    tensors = trainable(torch.float32, device)
    results = []
    for function in (block, block_of_two_nodes):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(**tensors)
            loss = out.float().sum()
            grads = torch.autograd.grad(loss, leaves_of(tensors)) if backward_inside else None
        results.append((out, *(grads or torch.autograd.grad(loss, leaves_of(tensors)))))
    assert results[0][0].dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in results[0][1:])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["hidden_states", "in_proj_weight", "outproj_weight", "D"])
def test_stale_tensors_are_noticed(name, device):
    tensors = trainable(torch.float32, device)
    out = block(**tensors)
    with torch.no_grad():
        tensors[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bias_of_another_dtype(device):
    tensors = block_inputs(torch.bfloat16, device)
    expected = block(**tensors)
    tensors["outproj_bias"] = tensors["outproj_bias"].float().requires_grad_()
    out = block(**tensors)
    out.float().sum().backward()
    assert torch.equal(out, expected) and tensors["outproj_bias"].grad.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(block(**tensors), expected)


def test_parameters_of_other_dtypes(device):
    module = Mamba2(D_MODEL, headdim=HEADDIM, d_state=16, device=device)
    x = torch.randn(2, 9, D_MODEL, device=device)
    expected = module(x)
    for name in ("A_log", "dt_bias"):
        setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().double()))
    out = module(x)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert module.A_log.grad.dtype == module.dt_bias.grad.dtype == torch.float64


def test_errors_name_the_parameter(device):
    tensors = block_inputs(torch.float32, device)
    for wrong, message in (
        (tensors["A_log"][:, None], "A_log must have 1 dimensions"),
        (tensors["A_log"].to(torch.complex64), "A_log"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            block(**{**tensors, "A_log": wrong})
    with pytest.raises(ValueError, match="dt_bias must have shape"):
        block(**{**tensors, "dt_bias": tensors["dt_bias"][1:]})


@pytest.mark.parametrize("limits", [(0.0, 1.0, 2.0), [1, 0], ["0", "1"], "01", [None, 1], [0, float("nan")], 1, None])
@pytest.mark.parametrize("kind", [Mamba2, Mamba2Simple])
def test_dt_limit_is_checked_when_the_layer_is_made(kind, limits):
    expected = f"{kind.__name__}: dt_limit must be (smallest, largest), got {limits!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        kind(D_MODEL, headdim=HEADDIM, dt_limit=limits)


def test_dt_limit_as_json_holds_it():
    assert Mamba2(D_MODEL, headdim=HEADDIM, dt_limit=[0, float("inf")]).dt_limit == (0.0, float("inf"))


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointing(reentrant, device):
    tensors = trainable(torch.float32, device)
    names, leaves = list(tensors), leaves_of(tensors)
    expected = torch.autograd.grad(block(**tensors).square().sum(), leaves)
    out = torch.utils.checkpoint.checkpoint(
        lambda *given: block(**dict(zip(names, given, strict=True))), *tensors.values(), use_reentrant=reentrant
    )
    for leaf in leaves:
        leaf.grad = None
    out.square().sum().backward()  # the reentrant kind works with .backward() alone
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected), rtol=1e-4, atol=1e-5)


def test_compile_with_narrow_parameters(device):
    tensors = trainable(torch.bfloat16, device, narrow=True)
    compiled = torch.compile(lambda **named: block(**named), fullgraph=True, backend="aot_eager")
    results = []
    for function in (block, compiled):
        out = function(**tensors)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves_of(tensors))))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_compile_with_a_frozen_projection(cast, device):
    tensors = block_inputs(torch.float32, device)
    leaves = [tensor.requires_grad_() for name, tensor in tensors.items() if tensor is not None and "proj" not in name]
    compiled = torch.compile(lambda **named: block(**named), fullgraph=True, backend="aot_eager")
    with torch.autocast(device, dtype=torch.bfloat16, enabled=cast):
        outs = compiled(**tensors), block(**tensors)
    found, expected = (torch.autograd.grad(out.float().square().sum(), leaves) for out in outs)
    tolerance = 5e-2 if cast else 1e-3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, theirs.abs().max().item()))
