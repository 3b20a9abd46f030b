"""plain_torch: blocks and operators without kernels, for what the kernels do not do."""

import json
import os
import sys

import pytest
import torch
from _helpers.programs import run_code
from _helpers.public_ops import PUBLIC_OPS

from mamba_ssm import Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_ssm._native import launch
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.modules.mamba2_simple import Mamba2Simple
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from mamba_ssm.utils.generation import InferenceParams
from mamba_ssm.utils.reference import plain_torch


@pytest.fixture
def no_kernels(monkeypatch):
    """Whoever looks for a kernel fails."""

    def refuse(*_):
        raise AssertionError("a kernel was asked for")

    for module in list(sys.modules.values()):
        if getattr(module, "place", None) is launch.place:
            monkeypatch.setattr(module, "place", refuse)


def flat(results):
    return [tensor for tensor in (results if isinstance(results, tuple) else (results,)) if tensor is not None]


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_operators(name, request):
    op = PUBLIC_OPS[name]
    torch.manual_seed(0)
    expected = flat(op.function(**op.arguments()))
    request.getfixturevalue("no_kernels")
    torch.manual_seed(0)
    with plain_torch():
        found = flat(op.function(**op.arguments()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_states_of_packed_sequences():
    x, dt, A, B, C = torch.randn(1, 9, 2, 4), torch.rand(1, 9, 2), -torch.rand(2), *torch.randn(2, 1, 9, 1, 3)
    bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    options = {"chunk_size": 4, "cu_seqlens": bounds, "initial_states": torch.randn(1, 2, 4, 3)}
    for wanted in ({"return_varlen_states": True}, {"return_final_states": True}, {}):
        results = [flat(mamba_chunk_scan_combined(x, dt, A, B, C, **options, **wanted))]
        with plain_torch():
            results.append(flat(mamba_chunk_scan_combined(x, dt, A, B, C, **options, **wanted)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


BLOCKS = {
    "mamba": lambda **options: Mamba(8, d_state=3, layer_idx=0, **options),
    "mamba2": lambda **options: Mamba2(8, d_state=3, headdim=4, layer_idx=0, **options),
    "mamba3": lambda **options: Mamba3(8, d_state=4, headdim=4, layer_idx=0, is_outproj_norm=True, **options),
    "mamba2_simple": lambda **options: Mamba2Simple(8, d_state=3, headdim=4, **options),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_second_derivatives_in_float64(kind, no_kernels):
    block, x = BLOCKS[kind](dtype=torch.float64), torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)
    with plain_torch():
        out = block(x)
        assert out.dtype == torch.float64
        weight = block.in_proj.weight
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), weight)

        def slope(step):
            with torch.no_grad():
                weight[3, 2] += step
            (dx,) = torch.autograd.grad(block(x).square().sum(), x)
            with torch.no_grad():
                weight[3, 2] -= step
            return dx.square().sum()

        expected = (slope(1e-5) - slope(-1e-5)) / 2e-5
    torch.testing.assert_close(ddx[3, 2], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_any_width_of_the_convolution(kind, width, no_kernels):
    """A sequence, and the same step by step."""
    with pytest.raises(ValueError, match="d_conv must be an integer from 2 to 4"):
        BLOCKS[kind](d_conv=width)
    with plain_torch(), torch.no_grad():
        block, x = BLOCKS[kind](d_conv=width), torch.randn(2, 7, 8)
        params = InferenceParams(max_seqlen=7, max_batch_size=2)
        parts = [block(x[:, :3], inference_params=params)]
        for t in range(3, 7):
            params.seqlen_offset = t
            parts.append(block(x[:, t : t + 1], inference_params=params))
        torch.testing.assert_close(torch.cat(parts, dim=1), block(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_language_models(layer, request):
    ssm_cfg = {"layer": layer, "d_state": 4, **({} if layer == "Mamba1" else {"headdim": 8})}
    config = {"d_intermediate": 20, "attn_layer_idx": [1], "attn_cfg": {"num_heads": 2, "d_conv": 3}}
    model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=3, vocab_size=30, ssm_cfg=ssm_cfg, **config))
    tokens = torch.randint(30, (2, 9))
    expected, text = model(tokens).logits, model.generate(tokens, 14)
    request.getfixturevalue("no_kernels")
    with plain_torch():
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(model.generate(tokens, 14), text)


@pytest.mark.parametrize("kind", ["mamba", "mamba3"])
def test_exported_programs_hold_torchs_operators_alone(kind):
    block, x = BLOCKS[kind](), torch.randn(1, 4, 8)
    with plain_torch(), torch.no_grad():
        program = torch.export.export(block, (x,))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names and not [name for name in names if "mamba_ssm" in name]
    torch.testing.assert_close(program.module()(x), block(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variable", [False, True])
def test_complex_A_as_in_upstreams_slow_path(variable, no_kernels):
    """Half of a real system whose other half is conjugate, so the real scan with twice the states is the truth."""
    torch.manual_seed(0)
    u, delta = torch.randn(2, 4, 9, dtype=torch.float64), torch.rand(2, 4, 9, dtype=torch.float64)
    A = torch.complex(-torch.rand(4, 3), torch.randn(4, 3)).to(torch.complex128)
    B, C = torch.randn(2, *((2, 2, 3, 9) if variable else (4, 3)), dtype=torch.complex128)
    pairs = [torch.view_as_real(tensor).flatten(-2) for tensor in (B, C)] if variable else (B, C)
    D, z = torch.randn(4, dtype=torch.float64), torch.randn_like(u)
    with plain_torch():
        out, state = selective_scan_fn(u, delta, A, *pairs, D, z, None, True, return_last_state=True)
    dt, h, expected = torch.nn.functional.softplus(delta), torch.zeros(2, 4, 3, dtype=torch.complex128), []
    for t in range(9):
        B_t, C_t = (matrix[..., t].repeat_interleave(2, 1) if variable else matrix for matrix in (B, C))
        h = torch.exp(dt[..., t, None] * A) * h + (dt * u)[..., t, None] * B_t
        expected.append((C_t * h + (C_t * h).conj()).sum(-1).real + D * u[..., t])
    torch.testing.assert_close(out, torch.stack(expected, -1) * torch.nn.functional.silu(z))
    torch.testing.assert_close(state, h)


LOST = [(name, "A") for name, op in PUBLIC_OPS.items() if "A" in op.arguments() and name != "selective_scan_fn"]
LOST += [("selective_scan_fn", name) for name in ("u", "delta", "B", "C", "D", "z")]  # B and C of a real A


@pytest.mark.parametrize("name,argument", LOST)
def test_no_imaginary_part_is_lost(name, argument):
    """What takes no complex numbers says so."""
    op = PUBLIC_OPS[name]
    given = op.arguments()
    given[argument] = given[argument].to(torch.complex64)
    with plain_torch(), pytest.raises(TypeError, match="must be a real float32 tensor, got complex64"):
        op.function(**given)


def test_pairs_of_another_length_than_a_complex_A_wants():
    u, A, B = torch.ones(1, 2, 5), torch.ones(2, 3, dtype=torch.complex64), torch.ones(1, 3, 5)
    with plain_torch(), pytest.raises(ValueError, match=r"B has real and imaginary parts in turn .* be 10, got 5"):
        selective_scan_fn(u, u, A, B, B)


def test_it_ends_where_it_began():
    u, A = torch.randn(1, 2, 3, dtype=torch.float64), -torch.rand(2, 1)
    with plain_torch():
        with plain_torch(False), pytest.raises(TypeError, match="got float64"):
            selective_scan_fn(u, u, A, A, A)
        selective_scan_fn(u, u, A, A, A)
    with pytest.raises(TypeError, match="got float64"):
        selective_scan_fn(u, u, A, A, A)


def test_the_variable():
    code = "import json, torch; from mamba_ssm import Mamba; y = Mamba(8, d_conv=7, dtype=torch.float64)"
    code += "(torch.zeros(1, 2, 8, dtype=torch.float64)); print(json.dumps(str(y.dtype)))"
    environ = {**os.environ, "MAMBA_SSM_REFERENCE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = run_code(code, environ=environ)
    assert done.returncode == 0 and json.loads(done.stdout) == "torch.float64", done.stderr
