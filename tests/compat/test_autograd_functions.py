"""Names that are autograd.Functions upstream: forward and backward with a ctx of the caller's, as apply has it."""

import array
import gc
import weakref

import pytest
import torch
from _helpers.cases import ScanCase
from _helpers.mamba3_cases import STATES, Mamba3Case

from mamba_ssm.ops import selective_scan_interface as interface
from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo
from mamba_ssm.ops.triton import (
    k_activations,
    layer_norm,
    layernorm,
    layernorm_gated,
    ssd_chunk_scan,
    ssd_chunk_state,
    ssd_combined,
    ssd_state_passing,
)
from mamba_ssm.ops.triton.mamba3 import mamba3_siso_combined


class Context:
    """The least that such code brings along."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        self.constant = tensors


def normal(*shape):
    return torch.randn(*shape)


def decays(*shape):
    return -torch.rand(*shape)


def scan_arguments():
    tensors = ScanCase(2, 6, 20).inputs(torch.float32, "cpu")
    return [tensors[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]


def inner_arguments():
    """d_inner 8, rank 2, N 4, d_model 6."""
    inner = normal(8, 1, 3), normal(8), normal(2 + 8, 8), normal(8, 2), normal(6, 8), normal(6)
    return [normal(2, 16, 9), *inner, decays(8, 4), None, None, normal(8), normal(8)]


def ssd_arguments():
    return [normal(2, 9, 4, 3), torch.rand(2, 9, 4), decays(4), normal(2, 9, 2, 5), normal(2, 9, 2, 5), 4]


def split_arguments():
    """4 heads of 3, 1 group, N 5."""
    return [normal(2, 9, 24 + 10 + 4), normal(22, 3), normal(22), normal(4), decays(4), normal(4), 4]


def mamba3_arguments(rank):
    """In upstream's layouts, of its Function's arguments without defaults."""
    case = Mamba3Case(2, 9, 2, 4, rank=rank, dstate=6, nangles=2, angles_of_heads=True, states=True)
    tensors = case.inputs(torch.float32, "cpu")
    for name in ("ADT", "DT", "Trap"):
        tensors[name] = tensors[name].transpose(1, 2)
    for name, dim in (("Q", 2), ("K", 2), ("Q_bias", 1), ("K_bias", 1), ("k_state", 1)):
        tensors[name] = tensors[name] if rank else tensors[name].squeeze(dim)
    names = ["Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias"]
    if rank:
        return [tensors[n] for n in (*names, "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", "D", "Z")] + [8, 4, None]
    return [tensors[name] for name in (*names, "Angles", "D", "Z", *STATES)] + [None, 64, True]


# class, arguments, options: what of each upstream returns a gradient for
CASES = {
    "scan": (interface.SelectiveScanFn, scan_arguments, {"delta_softplus": True}, 10),
    "scan-state": (interface.SelectiveScanFn, scan_arguments, {"return_last_state": True}, 10),
    "scan-reverse": (interface.SelectiveScanFn, scan_arguments, {"reverse": True}, 10),
    "inner": (interface.MambaInnerFn, inner_arguments, {}, 20),
    "swiglu": (k_activations.SwiGLU, lambda: [normal(3, 8)], {}, 1),
    "norm": (layer_norm.LayerNormFn, lambda: [normal(3, 8), normal(8), normal(8), normal(3, 8)], {"prenorm": True}, 14),
    "norm-alone": (layer_norm.LayerNormFn, lambda: [normal(3, 8), normal(8), None], {"prenorm": True}, 14),
    "norm-1.x": (layernorm.LayerNormFn, lambda: [normal(3, 8), normal(8), normal(8)], {}, 8),
    "norm-linear": (
        layer_norm.LayerNormLinearFn,
        lambda: [normal(3, 8), normal(8), normal(8), normal(5, 8), normal(5)],
        {"is_rms_norm": True},
        10,
    ),
    "gated": (layernorm_gated.LayerNormFn, lambda: [normal(3, 8), normal(8), normal(8), normal(3, 8)], {}, 8),
    "chunk-scan": (
        ssd_chunk_scan.ChunkScanFn,
        lambda: [normal(2, 8, 1, 5), normal(2, 8, 1, 5), normal(2, 8, 2, 3), *torch.rand(2, 2, 2, 2, 4).neg(),
                 normal(2, 2, 2, 3, 5)],
        {},
        8,
    ),
    "chunk-state": (
        ssd_chunk_state.ChunkStateFn,
        lambda: [normal(2, 8, 1, 5), normal(2, 8, 2, 3), *torch.rand(2, 2, 2, 2, 4).neg()],
        {},
        5,
    ),
    "passing": (ssd_state_passing.StatePassingFn, lambda: [normal(2, 3, 4, 6), decays(2, 4, 3)], {}, 3),
    "siso": (mamba3_siso_combined._Mamba3Function, lambda: mamba3_arguments(0), {}, 18),
    "mimo": (mamba3_mimo._Mamba3Function, lambda: mamba3_arguments(2), {"return_state": True}, 19),
    "ssd": (ssd_combined.MambaChunkScanCombinedFn, ssd_arguments, {"return_final_states": True}, 16),
    "split": (ssd_combined.MambaSplitConv1dScanCombinedFn, split_arguments, {"headdim": 3}, 19),
}  # fmt: skip


def several(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("case", CASES)
def test_a_ctx_of_the_callers(case):
    torch.manual_seed(0)
    function, make, options, count = CASES[case]
    given = make()
    leaves = [value.clone().requires_grad_() if isinstance(value, torch.Tensor) else value for value in given]
    expected = several(function.apply(*leaves, **options))
    smooth = [out for out in expected if out is not None and out.requires_grad]
    cotangents = [torch.randn_like(out) for out in smooth]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    wanted = iter(torch.autograd.grad(smooth, tensors, cotangents, allow_unused=True))
    wanted = [next(wanted) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

    ctx = Context()
    found = function.forward(ctx, *given, **options)
    for one, other in zip(several(found), expected, strict=True):
        assert one is other is None or (torch.equal(one, other) and not one.requires_grad)
    handed = iter(cotangents)
    handed = [next(handed) if out is not None and out.requires_grad else None for out in expected]
    for _ in range(2):  # ctx keeps all that a second call needs
        grads = several(function.backward(ctx, *handed))
        assert len(grads) == count and all(grad is None for grad in grads[len(given) :])
        for grad, other in zip(grads, wanted, strict=False):
            assert grad is other is None or torch.equal(grad, other)
    assert all(grad is None for grad in several(function.backward(ctx, *[None] * len(handed))))


def test_results_without_a_gradient_are_reported():
    ctx = Context()
    x, weight = torch.randn(3, 8), torch.randn(8)
    options = {"dropout_p": 0.5, "return_dropout_mask": True}
    y, mask, mask1 = layer_norm.LayerNormFn.forward(ctx, x, weight, None, **options)
    assert mask.dtype == torch.bool and mask1 is None and ctx.constant[0] is mask
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(y)
    expected = torch.nn.functional.layer_norm(leaf * mask / 0.5, (8,), weight, eps=1e-6)
    torch.testing.assert_close(y, expected)
    dx = layer_norm.LayerNormFn.backward(ctx, dy)[0]  # of the same mask
    torch.testing.assert_close(dx, torch.autograd.grad(expected, leaf, dy)[0])


def test_states_come_together():
    given = mamba3_arguments(0)
    given[12] = None
    with pytest.raises(ValueError, match="the four input states must be given together"):
        mamba3_siso_combined._Mamba3Function.forward(Context(), *given)


class Scaled(torch.autograd.Function):
    """An autograd.Function of another project, around one of ours."""

    @staticmethod
    def forward(ctx, factor, *given):
        ctx.factor = factor
        return factor * interface.SelectiveScanFn.forward(ctx, *given, True, False)

    @staticmethod
    def backward(ctx, dout):
        return None, *interface.SelectiveScanFn.backward(ctx, ctx.factor * dout)[:8]


def test_within_an_autograd_function():
    leaves = [value.requires_grad_() for value in scan_arguments()]
    expected = torch.autograd.grad(3 * interface.selective_scan_fn(*leaves, True).sum(), leaves)
    loss = Scaled.apply(3.0, *leaves).sum()
    for retain in (True, False):
        for found, other in zip(torch.autograd.grad(loss, leaves, retain_graph=retain), expected, strict=True):
            assert torch.equal(found, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)
    with pytest.raises(RuntimeError, match=r"SelectiveScanFn\.backward has no second derivative"):
        torch.autograd.grad(Scaled.apply(3.0, *leaves).sum(), leaves, create_graph=True)


class Copied(torch.autograd.Function):
    """A copy of a tensor whose memory a weak reference can watch."""

    @staticmethod
    def forward(ctx, x, memory):
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)

    @staticmethod
    def backward(ctx, dout):
        return dout, None


def test_backward_frees_what_forward_kept():
    """Also while the loss is held, as with any autograd.Function."""
    leaves = [value.requires_grad_() for value in scan_arguments()]
    memory = array.array("f", bytes(4 * leaves[0].numel()))
    alive = weakref.ref(memory)
    loss = Scaled.apply(3.0, Copied.apply(leaves[0], memory), *leaves[1:]).sum()
    del memory
    gc.collect()
    assert alive() is not None
    loss.backward()
    gc.collect()
    assert alive() is None and loss.grad_fn is not None


def test_under_autocast():
    leaves = [value.requires_grad_() for value in scan_arguments()]
    with torch.autocast("cpu", torch.bfloat16):
        expected = interface.selective_scan_fn(*leaves, True)
        ctx = Context()
        found = interface.SelectiveScanFn.forward(ctx, *leaves, True)
    assert torch.equal(found, expected)
    grads = interface.SelectiveScanFn.backward(ctx, torch.ones_like(found))  # outside, as the engine calls it
    for grad, other in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=False):
        assert torch.equal(grad, other)
