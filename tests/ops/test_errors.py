"""Wrong arguments: one clear error each, from the public functions and from torch.ops called directly."""

import inspect
import re

import pytest
import torch
from _helpers.cases import ConvCase, ScanCase, leaf
from _helpers.public_ops import PUBLIC_OPS

import mamba_ssm  # noqa: F401 (registers the operators)
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update

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
    ("seq_idx", lambda t: torch.zeros(2, 9, dtype=torch.int32), ValueError, "seq_idx and final states cannot"),
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


# Arguments without a default value that may be None.
MAY_BE_NONE = ("D", "D_ssm", "bias", "conv1d_bias", "dt_bias", "norm_bias", "linear_bias", "out_proj_bias")


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_no_tensors(name, grad):
    op = PUBLIC_OPS[name]
    if "update" in name and grad:
        pytest.skip("these have no gradient")
    good = op.arguments()
    tensors = {key: value for key, value in good.items() if isinstance(value, torch.Tensor)}
    if grad:
        good.update({key: leaf(value) for key, value in tensors.items() if key != "final_states_out"})
    op.function(**good)
    parameters = inspect.signature(op.function).parameters
    for key, tensor in tensors.items():
        values = [2.0, tensor.tolist(), tensor.detach().numpy()]
        if parameters[key].default is inspect.Parameter.empty and key not in MAY_BE_NONE:
            values.append(None)
        for value in values:
            with pytest.raises(TypeError, match=rf": {key} must be a torch\.Tensor, got {type(value).__name__}"):
                op.function(**{**good, key: value})
        if not key.endswith("proj_weight"):  # of torch's own matrix products
            with pytest.raises(TypeError, match=rf": {key} must be a dense tensor, got torch\.sparse_coo"):
                op.function(**{**good, key: tensor.detach().to_sparse()})


def test_which_tensor_is_wrong():
    """The one that disagrees with all others is named, also where the operator reads a size from it."""
    good = PUBLIC_OPS["selective_state_update"].arguments()
    conv_state = torch.zeros(4, 8, 3)
    with pytest.raises(ValueError, match=r"state must have shape \(B, D, N\) = \(4, 8, 4\), got \(4, 8, 3\)"):
        selective_state_update(**{**good, "state": conv_state})
    good = PUBLIC_OPS["layer_norm_fn"].arguments()
    with pytest.raises(ValueError, match=r"layer_norm: weight1 must have shape \(N,\) = \(8,\), got \(7,\)"):
        layer_norm_fn(**{**good, "weight1": torch.ones(7)})
    good = PUBLIC_OPS["layer_norm_linear_fn"].arguments()
    with pytest.raises(ValueError, match=r"linear_weight must have shape \(out features, N\) = \(4, 8\), got \(4, 7\)"):
        layer_norm_linear_fn(**{**good, "linear_weight": torch.ones(4, 7)})
    with pytest.raises(TypeError, match="linear_bias must have the dtype of linear_weight, float32, got float16"):
        layer_norm_linear_fn(**{**good, "linear_bias": torch.ones(4).half()})


NOT_A_NUMBER = [None, "small", [], torch.ones(2), 1j]
NUMBERS = [
    ("layer_norm_fn", "eps"),
    ("layer_norm_fn", "dropout_p"),
    ("layernorm_fn", "eps"),
    ("mamba_inner_fn", "b_c_dt_rms_eps"),
    ("mamba_split_conv1d_scan_combined", "rmsnorm_eps"),
]


@pytest.mark.parametrize("name,key", NUMBERS)
def test_numbers(name, key):
    op = PUBLIC_OPS[name]
    for value in NOT_A_NUMBER:
        with pytest.raises(TypeError, match=f": {key} must be a number, got {re.escape(repr(value))}"):
            op.function(**{**op.arguments(), key: value})


@pytest.mark.parametrize("name,key", [("layernorm_fn", "group_size"), ("causal_conv1d_varlen_states", "state_len")])
def test_integers(name, key):
    op = PUBLIC_OPS[name]
    for value in (True, 2.0, "4", [], torch.ones(2)):
        with pytest.raises(TypeError, match=f": {key} must be an integer, got {re.escape(repr(value))}"):
            op.function(**{**op.arguments(), key: value})
    for value in (-1, 2**31, 2**63):
        with pytest.raises(ValueError, match=f": {key} must .*got {value}"):
            op.function(**{**op.arguments(), key: value})
    op.function(**{**op.arguments(), key: torch.tensor(4)})


def test_a_scalar_for_x():
    for name in ("layer_norm_fn", "layernorm_fn", "swiglu"):
        op = PUBLIC_OPS[name]
        with pytest.raises(ValueError, match=r": xy? must have at least 1 dimension \(\.\.\., N\), got a scalar"):
            op.function(**{**op.arguments(), "xy" if name == "swiglu" else "x": torch.tensor(1.0)})
