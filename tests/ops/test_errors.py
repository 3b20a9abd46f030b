"""Wrong arguments: one clear error each, from the public functions and from torch.ops called directly."""

from functools import partial

import pytest
import torch
from cases import ConvCase, ScanCase

import mamba_ssm  # noqa: F401 (registers the operators)
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.streaming import SelectiveScan
from mamba_ssm.ops.triton.k_activations import swiglu
from mamba_ssm.ops.triton.layer_norm import layer_norm_fn
from mamba_ssm.ops.triton.layernorm_gated import layernorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

SCAN_ERRORS = [
    ("u", lambda t: t.double(), TypeError, "u must be float32, float16 or bfloat16, got float64"),
    ("u", lambda t: t.int(), TypeError, "u must be float32, float16 or bfloat16, got int32"),
    ("u", lambda t: t[0], ValueError, r"u must have 3 dimensions \(B, D, L\), got shape \(6, 20\)"),
    ("delta", lambda t: t.half(), TypeError, "delta must have the dtype of u, float32, got float16"),
    ("delta", lambda t: t[..., :-1], ValueError, r"delta must have shape \(B, D, L\) = \(2, 6, 20\), got \(2, 6, 19\)"),
    ("A", lambda t: t.to(torch.complex64), TypeError, "A must be a real float32 tensor, got complex64"),
    ("A", lambda t: t.double(), TypeError, "A must be float32, got float64"),
    ("A", lambda t: t[:-1], ValueError, r"A must have shape \(D, N\) = \(6, 16\), got \(5, 16\)"),
    ("A", lambda t: t.repeat(1, 17), ValueError, r"dstate .* must lie in 1\.\.256, got 272"),
    ("A", lambda t: t[:, :0], ValueError, r"dstate .* must lie in 1\.\.256, got 0"),
    ("B", lambda t: t.bfloat16(), TypeError, "B must have the dtype of u, float32, got bfloat16"),
    (
        "B",
        lambda t: t[:, :, :3],
        ValueError,
        r"B must have shape \(B, G, N, L\) = \(2, 2, 16, 20\), got \(2, 2, 3, 20\)",
    ),
    ("B", lambda t: t[0, 0, 0], ValueError, r"B must be \(B, G, N, L\), .*got shape \(20,\)"),
    ("B", lambda t: t.repeat(1, 2, 1, 1), ValueError, "dim .*must be a multiple of the number of groups.*got 4 groups"),
    ("B", lambda t: t[:, 0], ValueError, r"B must have shape \(B, G, N, L\) = \(2, 2, 16, 20\), got \(2, 16, 20\)"),
    ("C", lambda t: t[:, :1], ValueError, r"C must have shape \(B, G, N, L\) = \(2, 2, 16, 20\), got \(2, 1, 16, 20\)"),
    ("D", lambda t: t[:-1], ValueError, r"D must have shape \(D,\) = \(6,\), got \(5,\)"),
    ("z", lambda t: t[:1], ValueError, r"z must have shape"),
    ("delta_bias", lambda t: t.double(), TypeError, "delta_bias must be float32, got float64"),
    ("initial_state", lambda t: t[..., :-1], ValueError, r"initial_state must have shape \(B, D, N\) = \(2, 6, 16\)"),
    ("seq_idx", lambda t: t.long(), TypeError, "seq_idx must be int32, got int64"),
    ("seq_idx", lambda t: t[:, 1:], ValueError, r"seq_idx must have shape \(B, L\) = \(2, 20\), got \(2, 19\)"),
]


@pytest.mark.parametrize(
    "name,spoil,error,message", SCAN_ERRORS, ids=[row[0] + "-" + row[3][:30] for row in SCAN_ERRORS]
)
def test_selective_scan(name, spoil, error, message, device):
    tensors = ScanCase(2, 6, 20, groups=2, initial_state=True, seq_idx=True).inputs(torch.float32, device)
    selective_scan_fn(**tensors)
    tensors[name] = spoil(tensors[name])
    with pytest.raises(error, match=message):
        selective_scan_fn(**tensors)
    with pytest.raises(error, match=message):
        torch.ops.mamba_ssm.selective_scan(
            **tensors, delta_softplus=True, return_last_state=True, return_checkpoints=True
        )


def test_wrong_tensors_in_the_backward_operator(device):
    tensors = ScanCase(1, 4, 130).inputs(torch.float32, device)
    arguments = {**tensors, "delta_softplus": True}
    out, _, checkpoints = torch.ops.mamba_ssm.selective_scan(
        **arguments, return_last_state=False, return_checkpoints=True
    )
    backward = {
        **arguments, "dout": out, "dlast_state": None, "checkpoints": checkpoints, "need_dinitial_state": False,
        "recompute_out": False,
    }  # fmt: skip
    torch.ops.mamba_ssm.selective_scan_backward(**backward)
    for name, spoiled, error in (
        ("dout", out.half(), TypeError),
        ("dout", out[:, :2], ValueError),
        ("checkpoints", checkpoints[:-1], ValueError),
        ("checkpoints", checkpoints.double(), TypeError),
        ("dlast_state", torch.zeros(1, 4, 8, device=device), ValueError),
    ):
        with pytest.raises(error, match=name):
            torch.ops.mamba_ssm.selective_scan_backward(**{**backward, name: spoiled})


CONV_ERRORS = [
    ("x", lambda t: t.double(), TypeError, "x must be float32, float16 or bfloat16, got float64"),
    ("x", lambda t: t[0], ValueError, "x must have 3 dimensions"),
    ("weight", lambda t: t.repeat(1, 2), ValueError, "width .* must be 2, 3 or 4, got 8"),
    ("weight", lambda t: t[:, :1], ValueError, "width .* must be 2, 3 or 4, got 1"),
    ("weight", lambda t: t.long(), TypeError, "weight must be float32, float16 or bfloat16, got int64"),
    ("bias", lambda t: t[1:], ValueError, r"bias must have shape \(D,\) = \(8,\), got \(7,\)"),
    ("initial_states", lambda t: t.half(), TypeError, "initial_states must have the dtype of x, float32, got float16"),
    ("initial_states", lambda t: t[..., 1:], ValueError, r"initial_states must have shape \(B, D, W-1\) = \(2, 8, 3\)"),
    ("seq_idx", lambda t: torch.zeros(2, 9, dtype=torch.int32), ValueError, "seq_idx and initial_states cannot"),
    ("activation", lambda t: "relu", ValueError, "activation must be None, 'silu' or 'swish', got 'relu'"),
]


@pytest.mark.parametrize(
    "name,spoil,error,message", CONV_ERRORS, ids=[row[0] + "-" + row[3][:30] for row in CONV_ERRORS]
)
def test_causal_conv1d(name, spoil, error, message, device):
    tensors = ConvCase(2, 8, 9, initial_states=True, final_states=True).inputs(torch.float32, device)
    value = spoil(tensors[name])
    tensors[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(error, match=message):
        causal_conv1d_fn(**tensors)


def test_final_states_with_seq_idx(device):
    tensors = ConvCase(2, 8, 9, seq_idx=True).inputs(torch.float32, device)
    with pytest.raises(ValueError, match="seq_idx and final states cannot be asked for together"):
        causal_conv1d_fn(**{**tensors, "return_final_states": True})


def test_causal_conv1d_update(device):
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, 4, device=device)
    with pytest.raises(ValueError, match=r"conv_state must hold at least W-1 = 3 steps, got S = 2"):
        causal_conv1d_update(x, torch.randn(2, 8, 2, device=device), weight)
    with pytest.raises(ValueError, match=r"conv_state must have shape"):
        causal_conv1d_update(x, torch.randn(3, 8, 4, device=device), weight)
    with pytest.raises(TypeError, match="conv_state must be float32, float16 or bfloat16, got float64"):
        causal_conv1d_update(x, torch.randn(2, 8, 4, device=device).double(), weight)
    with pytest.raises(TypeError, match="cache_seqlens must be int32 or int64, got float32"):
        causal_conv1d_update(
            x, torch.randn(2, 8, 4, device=device), weight, cache_seqlens=torch.zeros(2, device=device)
        )


def test_selective_state_update(device):
    def call(**changes):
        tensors = {
            "state": torch.zeros(2, 8, 4), "x": torch.randn(2, 8), "dt": torch.randn(2, 8), "A": -torch.rand(8, 4),
            "B": torch.randn(2, 4), "C": torch.randn(2, 4), "z": None,
        }  # fmt: skip
        tensors = {name: None if t is None else t.to(device) for name, t in {**tensors, **changes}.items()}
        return selective_state_update(**tensors)

    call()
    for changes, error, message in (
        ({"state": torch.zeros(2, 8)}, ValueError, "state must have 3 dimensions"),
        ({"state": torch.zeros(2, 8, 4, 4)}, ValueError, r"x must have 3 dimensions \(B, H, P\)"),
        (
            {"state": torch.zeros(3, 8, 4)},
            ValueError,
            r"state must have shape \(B, D, N\) = \(2, 8, 4\), got \(3, 8, 4\)",
        ),
        ({"A": torch.zeros(8, 5)}, ValueError, r"A must have shape \(D, N\) = \(8, 4\), got \(8, 5\)"),
        ({"A": torch.zeros(8, 4, dtype=torch.complex64)}, TypeError, "A must be a real"),
        ({"C": torch.zeros(2, 4).half()}, TypeError, "C must have the dtype of B, float32, got float16"),
        ({"z": torch.zeros(2, 8).bfloat16()}, TypeError, "z must have the dtype of x"),
        ({"x": torch.zeros(2, 8).double()}, TypeError, "x must be float32"),
    ):
        with pytest.raises(error, match=message):
            call(**changes)


@pytest.mark.gpu
def test_mixed_devices(cuda):
    tensors = ScanCase(2, 6, 20, initial_state=True).inputs(torch.float32, cuda)
    for name in ("delta", "A", "B", "z", "delta_bias", "initial_state"):
        with pytest.raises(ValueError, match=f"{name} must be on cuda:0 like u, got cpu"):
            selective_scan_fn(**{**tensors, name: tensors[name].cpu()})
    x, weight = torch.randn(2, 8, 9, device=cuda), torch.randn(8, 4)
    with pytest.raises(ValueError, match="weight must be on cuda:0 like x, got cpu"):
        causal_conv1d_fn(x, weight)


def test_meta_tensors_give_shapes_and_the_same_errors():
    tensors = ScanCase(2, 6, 20).inputs(torch.float32, "meta")
    assert selective_scan_fn(**tensors).shape == (2, 6, 20)
    with pytest.raises(TypeError, match="delta must have the dtype of u"):
        selective_scan_fn(**{**tensors, "delta": tensors["delta"].half()})


# Each public function by a call that works; every argument in it is one that must be a tensor.
scan, conv = ScanCase(2, 6, 20).inputs(torch.float32, "cpu"), ConvCase(2, 8, 9).inputs(torch.float32, "cpu")
x, row = torch.randn(2, 8), torch.randn(8)
steps = {"u": torch.randn(2, 5, 8), "delta": torch.rand(2, 5, 8), "A": -torch.rand(8, 4), "B_ssm": torch.randn(2, 5, 4)}
CALLS = {
    "scan": (selective_scan_fn, {name: scan[name] for name in ("u", "delta", "A", "B", "C", "D", "z")}),
    "conv": (causal_conv1d_fn, {name: conv[name] for name in ("x", "weight", "bias")}),
    "conv_update": (
        causal_conv1d_update,
        {"x": x, "conv_state": torch.zeros(2, 8, 4), "weight": conv["weight"]},
    ),
    "state_update": (
        selective_state_update,
        {"state": torch.zeros(2, 8, 4), "x": x, "dt": x, "A": -torch.rand(8, 4), "B": x[:, :4], "C": x[:, :4]},
    ),
    "ssd": (
        partial(mamba_chunk_scan_combined, chunk_size=64),
        {"x": torch.randn(1, 5, 2, 4), "dt": torch.rand(1, 5, 2), "A": -torch.rand(2), "B": torch.randn(1, 5, 1, 4),
         "C": torch.randn(1, 5, 1, 4), "D": torch.randn(2), "initial_states": torch.zeros(1, 2, 4, 4)},
    ),
    "norm": (partial(layer_norm_fn, bias=None), {"x": x, "weight": row, "residual": x}),
    "gated_norm": (partial(layernorm_fn, bias=None), {"x": x, "weight": row, "z": x}),
    "swiglu": (swiglu, {"xy": x}),
    "SelectiveScan": (partial(SelectiveScan(), D_ssm=None), {**steps, "C_ssm": steps["B_ssm"]}),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("op", CALLS)
def test_no_tensors(op, grad):
    function, tensors = CALLS[op]
    if "update" in op and grad:
        pytest.skip("these have no gradient")
    tensors = {name: tensor.clone().requires_grad_(grad) for name, tensor in tensors.items()}
    function(**tensors)
    may_be_none = ("D", "z", "bias", "residual", "initial_states")
    for name, tensor in tensors.items():
        values = [2.0, tensor.tolist(), tensor.detach().numpy()] + [None] * (name not in may_be_none)
        for value in values:
            with pytest.raises(TypeError, match=rf": {name} must be a torch\.Tensor, got {type(value).__name__}"):
                function(**{**tensors, name: value})
    if op != "SelectiveScan":  # it looks at its arguments through views, which sparse tensors have too
        name = "x" if "x" in tensors else next(iter(tensors))
        with pytest.raises(TypeError, match=rf": {name} must be a dense tensor, got torch\.sparse_coo"):
            function(**{**tensors, name: tensors[name].detach().to_sparse()})
