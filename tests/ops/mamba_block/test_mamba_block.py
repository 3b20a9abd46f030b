"""mamba_block, a Mamba block in one autograd node, against its reference and the two nodes that it stands for."""

import pytest
import torch
import torch.utils.checkpoint
from _helpers.cases import DTYPES, assert_close_to_truth, dtype_id, fixed_sum, output_and_kept, outputs_and_gradients
from _helpers.mamba_inner_inputs import D_MODEL, DIM, inputs

from mamba_ssm.ops.mamba_block import BlockInputs
from mamba_ssm.ops.mamba_block import mamba_block as block_of_record
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, mamba_inner_ref


def mamba_block(*tensors, **named):
    return block_of_record(BlockInputs(*tensors, **named))


def block_inputs(dtype, device, batch=2, seqlen=71, bias=True, narrow=False):
    """Arguments of mamba_block; narrow: A_log, D and dt_bias have the dtype of the rest, else float32."""
    inner = inputs(dtype, device, batch, seqlen, bias=bias)
    parameters = {
        "A_log": torch.log(-inner["A"]),
        "D": inner["D"],
        "dt_bias": inner["delta_bias"],
    }
    return {
        "hidden_states": torch.randn(batch, seqlen, D_MODEL).to(device, dtype),
        "in_proj_weight": (torch.randn(2 * DIM, D_MODEL) * D_MODEL**-0.5).to(device, dtype),
        "in_proj_bias": torch.randn(2 * DIM).to(device, dtype) if bias else None,
        "conv1d_weight": inner["conv1d_weight"],
        "conv1d_bias": inner["conv1d_bias"],
        "x_proj_weight": inner["x_proj_weight"],
        "dt_proj_weight": inner["delta_proj_weight"],
        "out_proj_weight": inner["out_proj_weight"],
        "out_proj_bias": inner["out_proj_bias"],
        **{name: tensor.to(dtype) if narrow else tensor for name, tensor in parameters.items()},
    }


def block_ref(hidden_states, in_proj_weight, in_proj_bias, *inner, A_log, D, dt_bias, fn=mamba_inner_ref, **named):
    xz = torch.nn.functional.linear(hidden_states, in_proj_weight, in_proj_bias).transpose(1, 2)
    named["delta_proj_weight"] = named.pop("dt_proj_weight")
    wide = (lambda tensor: tensor) if A_log.dtype == torch.float64 else torch.Tensor.float
    A = -torch.exp(wide(A_log))
    return fn(xz, *inner, **named, A=A, D=wide(D), delta_bias=wide(dt_bias), delta_softplus=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 1, "seqlen": 1}, {"batch": 1, "seqlen": 1032}, {"batch": 3, "seqlen": 128}, {"bias": False}],
    ids=str,
)
def test_values_and_gradients(options, device):
    tensors = block_inputs(torch.float32, device, **options)
    found = outputs_and_gradients(mamba_block, tensors)
    plain = outputs_and_gradients(block_ref, tensors)
    truth = outputs_and_gradients(block_ref, tensors, torch.float64)
    assert_close_to_truth(found, plain, truth)
    with torch.no_grad():
        torch.testing.assert_close(mamba_block(**tensors), found["out0"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32_A", "narrow_A"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_low_precision(dtype, narrow, device):
    tensors = block_inputs(dtype, device, narrow=narrow)
    found = outputs_and_gradients(mamba_block, tensors)
    plain = outputs_and_gradients(block_ref, tensors)
    truth = outputs_and_gradients(block_ref, tensors, torch.float64)
    assert {name: found["d" + name].dtype for name in tensors} == {name: t.dtype for name, t in tensors.items()}
    # as for mamba_inner_fn; the input projection's rounding comes on top
    assert_close_to_truth(found, plain, truth, atol=6 * torch.finfo(dtype).eps)


def block_of_two_nodes(**tensors):
    """What mamba_block stands for: the projection by torch, then mamba_inner_fn."""
    return block_ref(**tensors, fn=mamba_inner_fn)


@pytest.mark.parametrize("trained", ["hidden_states", "in_proj_weight", "in_proj_bias", "A_log", "out_proj_weight"])
def test_frozen_inputs(trained, device):
    tensors = block_inputs(torch.float32, device)
    expected = outputs_and_gradients(block_of_two_nodes, tensors)["d" + trained]
    leaf = tensors[trained].requires_grad_()
    out, kept = output_and_kept(mamba_block, tensors)
    (found,) = torch.autograd.grad(fixed_sum(out), leaf)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # a product keeps only what the gradient of its other side takes
    assert (tensors["hidden_states"].data_ptr() in kept) == (trained == "in_proj_weight")
    assert (tensors["in_proj_weight"].data_ptr() in kept) == (trained == "hidden_states")


def test_keeps_no_more_than_two_nodes(device):
    sizes = []
    for block in (mamba_block, block_of_two_nodes):
        tensors = {name: tensor.requires_grad_() for name, tensor in block_inputs(torch.float32, device).items()}
        out, kept = output_and_kept(block, tensors)
        sizes.append(sum(kept.values()))
        del out
    assert sizes[0] <= sizes[1]


def test_autocast(device):
    tensors = {name: tensor.requires_grad_() for name, tensor in block_inputs(torch.float32, device).items()}
    results = []
    for block in (mamba_block, block_of_two_nodes):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = block(**tensors)
        assert out.dtype == torch.bfloat16
        results.append((out, *torch.autograd.grad(out.float().sum(), list(tensors.values()))))
    assert all(grad.dtype == torch.float32 for grad in results[0][1:])
    for found, expected in zip(*results, strict=True):  # in_proj_bias is added before or after a rounding
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["hidden_states", "in_proj_weight", "x_proj_weight", "D"])
def test_stale_tensors_are_noticed(name, device):
    tensors = {key: tensor.requires_grad_() for key, tensor in block_inputs(torch.float32, device).items()}
    out = mamba_block(**tensors)
    with torch.no_grad():
        tensors[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointing(reentrant, device):
    tensors = {name: tensor.requires_grad_() for name, tensor in block_inputs(torch.float32, device).items()}
    leaves = list(tensors.values())
    expected = torch.autograd.grad(mamba_block(**tensors).square().sum(), leaves)
    out = torch.utils.checkpoint.checkpoint(mamba_block, *leaves, use_reentrant=reentrant)
    for leaf in leaves:
        leaf.grad = None
    out.square().sum().backward()  # the reentrant kind works with .backward() alone
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected), rtol=1e-4, atol=1e-5)


def test_compile_with_narrow_parameters(device):
    tensors = {
        name: tensor.requires_grad_() for name, tensor in block_inputs(torch.bfloat16, device, narrow=True).items()
    }
    compiled = torch.compile(lambda **named: mamba_block(**named), fullgraph=True, backend="aot_eager")
    results = []
    for block in (mamba_block, compiled):
        out = block(**tensors)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), list(tensors.values()))))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


def test_compile_with_a_frozen_projection(device):
    tensors = block_inputs(torch.float32, device)
    leaves = [tensor.requires_grad_() for name, tensor in tensors.items() if not name.startswith("in_proj")]
    compiled = torch.compile(lambda **named: mamba_block(**named), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(**tensors).square().sum(), leaves)
    expected = torch.autograd.grad(mamba_block(**tensors).square().sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
