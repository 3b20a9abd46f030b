"""Names of other versions and of forks: the same numbers as what they stand for, with the arguments they have there."""

import pytest
import torch
from _helpers import mamba_inner_inputs
from _helpers.cases import ScanCase, outputs_and_gradients
from torch import nn

from mamba_ssm.modules import block, mamba_simple
from mamba_ssm.ops import selective_scan_interface as interface
from mamba_ssm.ops.triton import k_activations, layer_norm, layernorm, layernorm_gated, ssd_combined
from mamba_ssm.utils import determinism
from mamba_ssm.utils import torch as utils_torch


def test_classes_that_were_autograd_functions(device):
    tensors = ScanCase(2, 6, 20).inputs(torch.float32, device)
    given = [tensors[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    found = interface.SelectiveScanFn.apply(*given, True, True)
    for one, other in zip(found, interface.selective_scan_fn(*given, True, True), strict=True):
        assert torch.equal(one, other)
    assert interface.MambaInnerFn.apply is interface.mamba_inner_fn
    x, z, weight, bias = *torch.randn(2, 3, 8, device=device), *torch.randn(2, 8, device=device)
    found = layernorm_gated.LayerNormFn.apply(x, weight, bias, z, 1e-5, 4, False, True)
    assert torch.equal(found, layernorm_gated.rmsnorm_fn(x, weight, bias, z, 1e-5, 4, False))
    found = layer_norm.LayerNormFn.apply(x, weight, bias, z, None, None, None, 1e-5, 0.0, None, True, True)
    assert torch.equal(found[0], layer_norm.layer_norm_fn(x, weight, bias, z, eps=1e-5)) and len(found) == 2
    found = layer_norm.LayerNormLinearFn.apply(x, weight, bias, z, None, None, 1e-5)
    assert torch.equal(found, layer_norm.layer_norm_linear_fn(x, weight, bias, z, None, eps=1e-5))
    assert torch.equal(k_activations.SwiGLU.apply(x), k_activations.swiglu(x))
    assert ssd_combined.MambaChunkScanCombinedFn.apply is ssd_combined.mamba_chunk_scan_combined
    assert ssd_combined.MambaSplitConv1dScanCombinedFn.apply is ssd_combined.mamba_split_conv1d_scan_combined


@pytest.mark.parametrize("bias", [True, False])
def test_rms_norm_forward(bias, device):
    x, weight = torch.randn(2, 3, 8, device=device, requires_grad=True), torch.randn(8, device=device)
    offset = torch.randn(8, device=device) if bias else None
    found = interface.rms_norm_forward(x, weight, offset, 1e-3)
    assert not found.requires_grad
    torch.testing.assert_close(found, layer_norm.rms_norm_ref(x, weight, offset, eps=1e-3).detach())
    found = interface.rms_norm_forward(x, weight, offset, is_rms_norm=False)
    torch.testing.assert_close(found, layer_norm.layer_norm_ref(x, weight, offset).detach())


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_of_1_x(name, residual, device):
    x, weight = torch.randn(2, 3, 8, device=device).bfloat16(), torch.randn(8, device=device)
    added = torch.randn(2, 3, 8, device=device) if residual else None
    function, reference = getattr(layernorm, f"{name}_fn"), getattr(layernorm, f"{name}_ref")
    expected = getattr(layer_norm, f"{name}_fn")(
        x, weight, None, residual=added, eps=1e-3, prenorm=True, residual_in_fp32=True
    )
    rest = (1e-3, True, True) if name == "layer_norm" else (True, True, 1e-3)
    for found in (
        function(x, weight, None, added, *rest),
        function(x, weight, None, eps=1e-3, residual=added, prenorm=True, residual_in_fp32=True),
    ):
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert found[1].dtype == torch.float32
    found = layernorm.LayerNormFn.apply(x, weight, None, added, 1e-3, True, True, name == "rms_norm")
    assert torch.equal(found[0], expected[0])
    plain = reference(x, weight, None, added, 1e-3, True, upcast=True)
    torch.testing.assert_close(plain[0], expected[0], rtol=2e-2, atol=2e-2)  # bfloat16
    assert isinstance(layernorm.RMSNorm(8), layer_norm.RMSNorm)


@pytest.mark.parametrize("fused", [True, False])
def test_block_of_1_x(fused, device):
    torch.manual_seed(3)
    old = mamba_simple.Block(16, mamba_simple.Mamba, layernorm.RMSNorm, fused, True).to(device)
    torch.manual_seed(3)
    new = block.Block(16, mamba_simple.Mamba, nn.Identity, layernorm.RMSNorm, fused, True).to(device)
    assert old.state_dict().keys() == new.state_dict().keys()
    x, residual = torch.randn(2, 2, 5, 16, device=device)
    for found, expected in zip(old(x, residual), new(x, residual), strict=True):
        assert torch.equal(found, expected)
    assert isinstance(mamba_simple.Block(16, mamba_simple.Mamba).norm, nn.LayerNorm)


INNER = ("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "A", "B", "C", "D", "delta_bias")


@pytest.mark.parametrize(
    "options", [{}, {"proj_bias": True}, {"B": "constant", "C": "given"}, {"bias": False}], ids=str
)
def test_inner_functions_of_forks(options, device):
    tensors = mamba_inner_inputs.inputs(torch.float32, device, **options)
    tensors["A_b"] = 1.5 * tensors["A"]
    names = (*INNER, "B_proj_bias", "C_proj_bias")
    ones = torch.eye(24, device=device)  # the output projection that changes nothing

    def close(function, reference, given):
        found, expected = (
            outputs_and_gradients(f, {name: tensors[name] for name in given}) for f in (function, reference)
        )
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            scale = value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4 * max(1.0, scale), msg=name)

    def no_out_proj(**t):
        return interface.mamba_inner_fn_no_out_proj(*(t[name] for name in INNER), t["B_proj_bias"], t["C_proj_bias"])

    def inner_ref(A, **t):
        return interface.mamba_inner_ref(**t, out_proj_weight=ones, out_proj_bias=None, A=A).transpose(1, 2)

    close(no_out_proj, inner_ref, names)

    def bimamba_ref(A, A_b, out_proj_weight, out_proj_bias, **t):
        """By channels: the reversed half takes everything the other way round but the convolution."""
        weight, rank = t["conv1d_weight"].squeeze(1), t["delta_proj_weight"].shape[1]
        x, z = t["xz"].chunk(2, dim=1)
        x = nn.functional.silu(
            nn.functional.conv1d(nn.functional.pad(x, (3, 0)), weight[:, None], t["conv1d_bias"], groups=24)
        )
        x_dbl = nn.functional.linear(x.transpose(1, 2), t["x_proj_weight"])
        delta = nn.functional.linear(x_dbl[..., :rank], t["delta_proj_weight"]).transpose(1, 2)
        matrices, first = [], rank
        for name in ("B", "C"):
            matrix = t[name]
            if matrix is None:
                matrix, first = x_dbl[..., first : first + 5].transpose(1, 2), first + 5
                bias = t[f"{name}_proj_bias"]
                matrix = matrix if bias is None else matrix + bias[:, None]
            matrices.append(matrix)
        y = interface.selective_scan_ref(x, delta, A, *matrices, t["D"], z, t["delta_bias"], True)
        flipped = (m if m.dim() == 2 else m.flip(-1) for m in matrices)
        back = interface.selective_scan_ref(
            x.flip(-1), delta.flip(-1), A_b, *flipped, t["D"], z.flip(-1), t["delta_bias"], True
        )
        return nn.functional.linear((y + back.flip(-1)).transpose(1, 2), out_proj_weight, out_proj_bias)

    close(interface.bimamba_inner_fn, bimamba_ref, (*names, "A_b", "out_proj_weight", "out_proj_bias"))


def test_deterministic_mode(monkeypatch):
    try:
        assert not determinism.use_deterministic_mode()
        monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
        assert determinism.use_deterministic_mode()
        determinism.set_deterministic_mode(False)
        assert not determinism.use_deterministic_mode()
        determinism.set_deterministic_mode(None)
        monkeypatch.setenv("MAMBA_DETERMINISTIC", "0")
        torch.use_deterministic_algorithms(True)
        assert not determinism.use_deterministic_mode()
        monkeypatch.delenv("MAMBA_DETERMINISTIC")
        assert determinism.use_deterministic_mode()
    finally:
        determinism.set_deterministic_mode(None)
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_deterministic_mode_of_the_scan(cuda):
    tensors = ScanCase(4, 256, 700).inputs(torch.float32, cuda)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if tensor is not None}
    try:
        determinism.set_deterministic_mode(True)
        outs = (interface.selective_scan_fn(**leaves, delta_softplus=True) for _ in range(3))
        runs = [torch.autograd.grad(out.sum(), [*leaves.values()]) for out in outs]
    finally:
        determinism.set_deterministic_mode(None)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_custom_fwd_and_bwd():
    class Double(torch.autograd.Function):
        @staticmethod
        @utils_torch.custom_fwd
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @utils_torch.custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.eq(2).all()
    assert utils_torch.custom_amp_decorator(lambda f, **options: options, True)(None) == {"device_type": "cuda"}
    assert utils_torch.custom_amp_decorator(lambda f, **options: options, False)(None) == {}
