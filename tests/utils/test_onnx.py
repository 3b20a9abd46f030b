"""ONNX files of models and operators, run in onnxruntime on the CPU against torch."""

import importlib.util

import pytest
import torch

from mamba_ssm import BiMamba2, Mamba, Mamba2, Mamba3, MambaLMHeadModel, selective_scan_fn
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.ops.selective_scan.reference import selective_scan_ref
from mamba_ssm.ops.ssd.reference import ssd_chunk_scan_combined_ref
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from mamba_ssm.utils.onnx import export

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
OLD = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 7)
REASON = "needs torch 2.7" if OLD else f"not installed: {', '.join(MISSING)}"
needs_onnx = pytest.mark.skipif(bool(MISSING) or OLD, reason=REASON)
QUIET = {"verbose": False, "external_data": False}
# Both compute in float32, but add in another order; logits and outputs here are of size 1.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def session(path, runtime_operators=False):
    onnxruntime = pytest.importorskip("onnxruntime")
    version = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    if runtime_operators and version < (1, 25):
        pytest.skip(f"LinearAttention came with onnxruntime 1.25, and this is {onnxruntime.__version__}")
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def run(loaded, *tensors):
    names = [one.name for one in loaded.get_inputs()]
    feed = {name: tensor.detach().numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(array) for array in loaded.run(None, feed)]


def language_model(layer):
    ssm_cfg = {"layer": layer, "d_state": 4, **({} if layer == "Mamba1" else {"headdim": 8})}
    config = MambaConfig(d_model=16, n_layer=1, vocab_size=24, ssm_cfg=ssm_cfg, d_intermediate=24)
    return MambaLMHeadModel(config).eval()


runtime_operators = pytest.mark.parametrize("runtime_operators", [False, True], ids=["chunks", "runtime_operators"])
SIZES = [(1, 1), (3, 2), (1, 16), (2, 17), (2, 61), (1, 128), (1, 131)]
PIECES = [[1] * 7, [2, 1, 3, 1], [67, 1, 1], [16, 64, 1]]


def zero_states(model, batch):
    return [state for states in model.allocate_inference_cache(batch, 0).values() for state in states]


def same(found, expected, case):
    torch.testing.assert_close(found, expected.detach(), **ROUNDING, msg=lambda text: f"{case}: {text}")


@needs_onnx
@runtime_operators
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_one_file_takes_prompts_and_steps(layer, runtime_operators, tmp_path):
    """Any batch and length; and pieces, shorter than the convolution too, that go on from the states of those before.

    One test, so that processes of pytest do not export the same file twice.
    """
    torch.manual_seed(0)
    model, path = language_model(layer), tmp_path / "model.onnx"
    program = export(model, path, states=True, runtime_operators=runtime_operators, **QUIET)
    kinds = [node.op_type for node in program.model.graph]
    assert ("LinearAttention" if runtime_operators else "Scan") in kinds
    assert ("CausalConvWithState" if runtime_operators else "Conv") in kinds
    assert len(kinds) < 300, "the file grows with the length"
    loaded = session(path, runtime_operators)
    for batch, length in SIZES:
        tokens = torch.randint(24, (batch, length))
        logits, *states = run(loaded, tokens, *zero_states(model, batch))
        same(logits, model(tokens).logits, (batch, length))
        assert [state.shape for state in states] == [state.shape for state in zero_states(model, batch)]
    for pieces in PIECES:
        tokens = torch.randint(24, (2, sum(pieces)))
        states, logits = zero_states(model, 2), []
        for piece in tokens.split(pieces, dim=1):
            out, *states = run(loaded, piece, *states)
            logits.append(out)
        same(torch.cat(logits, dim=1), model(tokens).logits, pieces)


class Scans(torch.nn.Module):
    """Both scans with what blocks do not ask for: groups, reverse, large decays, no D, a clamp of dt."""

    def forward(self, u, dt, A, B, C, state, x, steps, decay, matrices, states):
        y, last = selective_scan_fn(u, dt, A, B, C, return_last_state=True, initial_state=state, reverse=True)
        options = {"dt_limit": (0.1, 90.0), "initial_states": states, "return_final_states": True, "reverse": True}
        out, final = mamba_chunk_scan_combined(x, steps, decay, matrices, matrices, 64, **options)
        return y, last, out, final


def scan_inputs(batch, length, dtype):
    torch.manual_seed(length)
    u, B, C = (torch.randn(batch, *sizes, length) for sizes in ((6,), (3, 4), (3, 4)))
    dt = torch.rand(batch, 6, length) * 100  # exp(-1600): a form that divides by products of decays overflows
    x, matrices = torch.randn(batch, length, 6, 2), torch.randn(batch, length, 3, 4)
    steps = torch.rand(batch, length, 6) * 3
    state, states = torch.randn(batch, 6, 4), torch.randn(batch, 6, 2, 4)
    scan = u, dt, -torch.rand(6, 4) * 16, B, C, state
    return [tensor.to(dtype) for tensor in (*scan, x, steps, -torch.rand(6), matrices, states)]


@needs_onnx
@runtime_operators
def test_operators_in_a_module_of_ones_own(runtime_operators, tmp_path):
    path = tmp_path / "scans.onnx"
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = [{0: batch, 2: length}] * 2 + [None] + [{0: batch, 3: length}] * 2 + [{0: batch}]
    shapes += [{0: batch, 1: length}] * 2 + [None, {0: batch, 1: length}, {0: batch}]
    inputs = tuple(scan_inputs(2, 9, torch.float32))
    export(Scans(), path, inputs, dynamic_shapes=tuple(shapes), runtime_operators=runtime_operators, **QUIET)
    loaded = session(path, runtime_operators)
    for sizes in ((1, 1), (2, 16), (1, 67), (2, 130)):
        found = run(loaded, *scan_inputs(*sizes, torch.float32))
        u, dt, A, B, C, state, x, steps, decay, matrices, states = scan_inputs(*sizes, torch.float64)
        options = {"dt_limit": (0.1, 90.0), "initial_states": states, "return_final_states": True, "reverse": True}
        expected = [
            *selective_scan_ref(u, dt, A, B, C, return_last_state=True, initial_state=state, reverse=True),
            *ssd_chunk_scan_combined_ref(x, steps, decay, matrices, matrices, None, **options),
        ]
        # Products dt x of up to 300 are rounded to float32; a sum of 64 exponents of up to 3 is by 1e-5 off in exp.
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=3e-5, atol=3e-5 * float(other.abs().max()))


class Split(torch.nn.Module):
    """A Mamba-2 block by the function that forks call."""

    def __init__(self):
        super().__init__()
        self.block = Mamba2(16, d_state=4, headdim=8)

    def forward(self, x):
        of = self.block
        weights = of.conv1d.weight.squeeze(1), of.conv1d.bias, of.dt_bias, -torch.exp(of.A_log.float()), of.D
        options = {"rmsnorm_weight": of.norm.weight, "outproj_weight": of.out_proj.weight, "headdim": 8}
        return mamba_split_conv1d_scan_combined(of.in_proj(x), *weights, 64, **options)


@needs_onnx
def test_blocks_in_16_bits_and_in_both_directions(tmp_path):
    """float16 outside of the scans; layers that see a sequence from both ends."""
    mixed = torch.nn.Sequential(
        Mamba(16, d_state=4, bimamba_type="v2"), BiMamba2(16, d_state=4, headdim=8), Split()
    ).half()
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    export(mixed, tmp_path / "mixed.onnx", (torch.randn(2, 9, 16).half(),), dynamic_shapes=shapes, **QUIET)
    loaded = session(tmp_path / "mixed.onnx")
    for batch, length in ((1, 1), (3, 35)):
        x = torch.randn(batch, length, 16).half()
        # float16 has a relative error of 5e-4 at each of the layers' intermediate results
        torch.testing.assert_close(run(loaded, x)[0], mixed(x).detach(), rtol=5e-3, atol=5e-3)


@needs_onnx
def test_a_block_alone(tmp_path):
    block = Mamba(8, d_state=3).eval()
    block.out_proj.train()
    export(block, tmp_path / "block.onnx", **QUIET)
    assert [name for name, module in block.named_modules() if module.training] == ["out_proj"]
    loaded = session(tmp_path / "block.onnx")
    assert [one.name for one in (*loaded.get_inputs(), *loaded.get_outputs())] == ["hidden_states", "out"]
    x = torch.randn(2, 19, 8)
    torch.testing.assert_close(run(loaded, x)[0], block(x).detach(), **ROUNDING)


class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Mamba(8)

    def forward(self, x, seq_idx):
        return self.block(x, seq_idx=seq_idx)


class Constant(torch.nn.Module):
    def forward(self, u, A, B):
        return selective_scan_fn(u, u, A, B, B)


UNFIT = {
    "packed": (Packed, (torch.randn(1, 4, 8), torch.zeros(1, 4, dtype=torch.int32)), "seq_idx has no ONNX form"),
    "constant": (Constant, (torch.ones(1, 4, 5), -torch.ones(4, 2), torch.ones(4, 2)), r"constant of shape \(4, 2\)"),
    "mamba3": (lambda: Mamba3(8, d_state=4, headdim=4), None, "the model is a Mamba3, which has no ONNX form"),
    "mamba3_inside": (lambda: torch.nn.Sequential(Mamba3(8, d_state=4, headdim=4)), None, "0 is a Mamba3"),
}


@needs_onnx
@pytest.mark.parametrize("name", UNFIT)
def test_what_has_no_onnx_form_is_refused(name):
    make, args, message = UNFIT[name]
    with pytest.raises(ValueError, match=message):
        export(make(), None, args, **QUIET)


@needs_onnx
def test_wrong_calls():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        export(3)
    with pytest.raises(TypeError, match="must be a MambaLMHeadModel, Mamba or Mamba2, got Linear"):
        export(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="states=True makes the inputs itself"):
        export(Mamba(8), None, (torch.ones(1, 2, 8),), states=True)
    with pytest.raises(
        ValueError, match="must be a Mamba or Mamba2 block with a layer_idx, got Mamba with layer_idx=None"
    ):
        export(Mamba(8), states=True)
    attention = MambaConfig(d_model=16, n_layer=2, vocab_size=24, attn_layer_idx=[1], attn_cfg={"num_heads": 2})
    with pytest.raises(ValueError, match="must be a Mamba or Mamba2 block with a layer_idx, got MHA with layer_idx=1"):
        export(MambaLMHeadModel(attention), states=True)
    both = Mamba(8, bimamba_type="v1", layer_idx=0)
    with pytest.raises(ValueError, match="bimamba_type='v1'"):
        export(both, states=True)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.1+cpu")
    with pytest.raises(RuntimeError, match=r"needs torch 2\.7 or newer, .*, got 2\.6\.1\+cpu"):
        export(Mamba(8))
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnx and onnxscript: pip install 'mamba_ssm\[onnx\]'"):
        export(Mamba(8))
