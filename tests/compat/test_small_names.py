"""Names and arguments that forks use of modules which are otherwise tested elsewhere."""

import pytest
import torch
import torch.nn.functional as F

from mamba_ssm.distributed.tensor_parallel import VocabParallelEmbedding
from mamba_ssm.modules.ssd_minimal import segsum, segsum_unstable
from mamba_ssm.ops.triton import k_activations, layernorm_gated, ssd_chunk_scan, ssd_combined
from mamba_ssm.ops.triton.softplus import softplus


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (ssd_chunk_scan, ("chunk_scan", "chunk_scan_ref", "_chunk_scan_bwd_ddAcs_prev")),
        (layernorm_gated, ("rmsnorm_fn", "_layer_norm_fwd", "_layer_norm_bwd")),
        (k_activations, ("_swiglu_fwd", "_swiglu_bwd")),
    ],
    ids=["chunk_scan", "norm", "swiglu"],
)
def test_ssd_combined_hands_on(module, names):
    for name in names:
        assert getattr(ssd_combined, name) is getattr(module, name)


def test_ensure_stride():
    x = torch.randn(2, 5, 24)
    assert ssd_combined.ensure_stride(x) is x
    part = torch.randn(2, 5, 16)[..., 3:11]
    assert ssd_combined.ensure_stride(part) is part
    odd = torch.randn(2, 5, 13)[..., :8]
    fixed = ssd_combined.ensure_stride(odd)
    assert fixed.stride() == (40, 8, 1) and torch.equal(fixed, odd)


def test_init_to_zero():
    tensors = {"a": torch.ones(3), "b": None, "c": torch.ones(2)}
    ssd_combined.init_to_zero(["a", "b"])(tensors)
    assert tensors["a"].eq(0).all() and tensors["c"].eq(1).all()


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16])
def test_state_dtype(state_dtype):
    torch.manual_seed(0)
    x, dt, A = torch.randn(2, 9, 4, 3), torch.rand(2, 9, 4), -torch.rand(4)
    B, C = torch.randn(2, 2, 9, 2, 5)
    given = x, dt, A, B, C
    out, _, _, _, states, final = ssd_combined._mamba_chunk_scan_combined_fwd(*given, 4, state_dtype=state_dtype)
    plain = ssd_combined._mamba_chunk_scan_combined_fwd(*given, 4)
    assert torch.equal(out, plain[0])
    wanted = state_dtype or torch.float32
    assert states.dtype == final.dtype == wanted
    assert torch.equal(states, plain[4].to(wanted)) and torch.equal(final, plain[5].to(wanted))
    grads = ssd_combined._mamba_chunk_scan_combined_bwd(out, *given, out, 4, state_dtype=state_dtype)
    for grad, other in zip(grads, ssd_combined._mamba_chunk_scan_combined_bwd(out, *given, out, 4), strict=True):
        assert grad is other is None or torch.equal(grad, other)
    with pytest.raises(TypeError, match="state_dtype must be a floating-point"):
        ssd_combined._mamba_chunk_scan_combined_bwd(out, *given, out, 4, state_dtype=torch.int32)


@pytest.mark.parametrize("shape", [(2, 3, 7), (1,), (2, 0)])
def test_segsum_unstable(shape):
    x = torch.randn(*shape, dtype=torch.float64)
    torch.testing.assert_close(segsum_unstable(x), segsum(x))


def test_arguments_by_name():
    dt = torch.tensor([-3.0, 0.5, 30.0])
    assert torch.equal(softplus(dt=dt), F.softplus(dt))
    embedding, tokens = VocabParallelEmbedding(11, 4), torch.tensor([[1, 10]])
    assert torch.equal(embedding(input=tokens), embedding.weight[tokens])
