"""Every public operator with a call that works, nearly all of its arguments given: where tests of bad ones start."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from _helpers import mamba2_inner_inputs, mamba_inner_inputs
from _helpers.cases import ConvCase, ScanCase, SsdCase
from _helpers.mamba3_cases import STATES, Mamba3Case
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from mamba_ssm.ops.cross_selective_scan import cross_selective_scan
from mamba_ssm.ops.mamba3_scan import mamba3_scan
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.streaming import SelectiveScan
from mamba_ssm.ops.triton.k_activations import swiglu
from mamba_ssm.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn
from mamba_ssm.ops.triton.layernorm_gated import layernorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined

F32 = torch.float32


@dataclass(frozen=True)
class PublicOp:
    """function, the name by which its errors call it, and a function that draws good arguments."""

    function: Callable
    called: str
    arguments: Callable[[], dict[str, Any]]


def _scan():
    tensors = ScanCase(2, 6, 20, dstate=4, groups=2, initial_state=True, seq_idx=True).inputs(F32, "cpu")
    return {**tensors, "delta_softplus": True, "return_last_state": True}


def _cross_scan():
    weights = {"x_proj_weight": torch.randn(4, 10, 6), "dt_proj_weight": torch.randn(4, 6, 2)}
    parameters = {"A": -torch.rand(4, 6, 4), "D": torch.randn(4, 6), "dt_bias": torch.randn(4, 6)}
    return {"x": torch.randn(2, 6, 5, 3), **weights, **parameters, "delta_softplus": True}


def _inner():
    tensors = mamba_inner_inputs.inputs(F32, "cpu", batch=1, seqlen=5, proj_bias=True, rms=True)
    return {**tensors, "delta_softplus": True, "checkpoint_lvl": 1, "b_c_dt_rms_eps": 1e-6}


def _streaming():
    tensors = {"u": torch.randn(2, 5, 8), "delta": torch.rand(2, 5, 8), "A": -torch.rand(8, 4), "D_ssm": torch.randn(8)}
    return {**tensors, "B_ssm": torch.randn(2, 5, 4), "C_ssm": torch.randn(2, 5, 4), "h_prev": torch.zeros(2, 8, 4)}


def _conv():
    final_states_out = torch.zeros(2, 8, 3)
    return {
        **ConvCase(2, 8, 9, initial_states=True, final_states=True).inputs(F32, "cpu"),
        "final_states_out": final_states_out,
    }


def _conv_packed():
    return ConvCase(2, 8, 9, seq_idx=True, initial_states=True).inputs(F32, "cpu")


def _conv_update():
    tensors = {"x": torch.randn(2, 8, 1), "conv_state": torch.zeros(4, 8, 4), "weight": torch.randn(8, 4)}
    indices = {"cache_seqlens": torch.tensor([3, 5]), "conv_state_indices": torch.tensor([3, 1], dtype=torch.int32)}
    return {**tensors, "bias": torch.randn(8), "activation": "silu", **indices}


def _varlen_states():
    return {"x": torch.randn(9, 8), "cu_seqlens": torch.tensor([0, 2, 9]), "state_len": 3}


def _state_update():
    x, matrix = torch.randn(2, 8), torch.randn(2, 4)
    tensors = {"state": torch.zeros(4, 8, 4), "x": x, "dt": x, "A": -torch.rand(8, 4), "B": matrix, "C": matrix}
    tensors.update(D=torch.randn(8), z=x, dt_bias=torch.randn(8), state_batch_indices=torch.tensor([2, 0]))
    return {**tensors, "dt_softplus": True}


def _state_update_heads():
    x, matrix, parameter = torch.randn(2, 4, 3), torch.randn(2, 2, 5), torch.randn(4, 3)
    tensors = {"state": torch.zeros(2, 4, 3, 5), "x": x, "dt": x, "A": -torch.rand(4, 3, 5), "B": matrix, "C": matrix}
    return {**tensors, "D": parameter, "z": x, "dt_bias": parameter, "dt_softplus": True}


def _state_update_steps():
    x, matrix, rows = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.tensor([1, 3])
    tensors = {"state": torch.zeros(4, 8, 4), "x": x, "dt": x, "A": -torch.rand(8, 4), "B": matrix, "C": matrix}
    tensors.update(D=torch.randn(8), z=x, dt_bias=torch.randn(8), state_batch_indices=torch.tensor([2, 0]))
    return {**tensors, "dst_state_batch_indices": rows, "intermediate_states_buffer": torch.zeros(2, 3, 8, 4)}


def _ssd():
    case = SsdCase(1, 9, 2, 4, dstate=4, z=True, initial_states=True, seq_idx=True)
    options = {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32), "state_dtype": torch.float32}
    returned = {"return_final_states": True, "return_varlen_states": True}
    return {**case.inputs(F32, "cpu"), **case.options(), **options, **returned}


def _mamba3():
    case = Mamba3Case(1, 9, 2, 4, dstate=8, nangles=2, rank=2, norm=True, states=True, cu_seqlens=(0, 4, 9))
    options = {"norm_eps": 1e-5, "pairwise": False, "return_final_states": True}
    return {**case.inputs(F32, "cpu"), **options}


def _mamba3_scan(**arguments):
    """mamba3_scan, with the initial and final states beside the other arguments and results."""
    states = tuple(arguments.pop(name, None) for name in STATES)
    results = mamba3_scan(**arguments, initial_states=states)
    return (results[0], *results[1]) if isinstance(results, tuple) else results


_mamba3_scan.__signature__ = inspect.Signature(
    [
        *inspect.signature(mamba3_scan).parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in STATES),
    ]
)


def _split_conv1d_scan():
    tensors, options = mamba2_inner_inputs.inputs(F32, "cpu", 1, 5, initial_states=True, seq_idx=True)
    options.update(dt_limit=(0.0, 1.0), return_final_states=True, activation="silu", rmsnorm_eps=1e-6)
    return {**tensors, **options, "norm_before_gate": True, "state_dtype": torch.float32}


def _norm():
    wide, row = torch.randn(2, 3, 8), torch.randn(8)
    tensors = {"x": wide, "weight": row, "bias": row, "residual": wide, "x1": wide, "weight1": row, "bias1": row}
    options = {"eps": 1e-6, "dropout_p": 0.25, "rowscale": None, "prenorm": True, "residual_in_fp32": True}
    return {**tensors, **options, "is_rms_norm": False, "return_dropout_mask": True}


def _norm_linear():
    x, row = torch.randn(3, 8), torch.randn(8)
    tensors = {"x": x, "norm_weight": row, "norm_bias": row, "linear_weight": torch.randn(4, 8), "residual": x}
    return {**tensors, "linear_bias": torch.randn(4), "eps": 1e-6, "prenorm": True}


def _gated_norm():
    x, row = torch.randn(3, 8), torch.randn(8)
    options = {"eps": 1e-6, "group_size": 4, "norm_before_gate": True, "is_rms_norm": False}
    return {"x": x, "weight": row, "bias": row, "z": x, **options}


PUBLIC_OPS = {
    "selective_scan_fn": PublicOp(selective_scan_fn, "selective_scan", _scan),
    "cross_selective_scan": PublicOp(cross_selective_scan, "cross_selective_scan", _cross_scan),
    "mamba_inner_fn": PublicOp(mamba_inner_fn, "mamba_inner_fn", _inner),
    "SelectiveScan": PublicOp(SelectiveScan().forward_with_state, "SelectiveScan", _streaming),
    "causal_conv1d_fn": PublicOp(causal_conv1d_fn, "causal_conv1d", _conv),
    "causal_conv1d_fn, packed": PublicOp(causal_conv1d_fn, "causal_conv1d", _conv_packed),
    "causal_conv1d_update": PublicOp(causal_conv1d_update, "causal_conv1d_update", _conv_update),
    "causal_conv1d_varlen_states": PublicOp(causal_conv1d_varlen_states, "causal_conv1d_varlen_states", _varlen_states),
    "selective_state_update": PublicOp(selective_state_update, "selective_state_update", _state_update),
    "selective_state_update, heads": PublicOp(selective_state_update, "selective_state_update", _state_update_heads),
    "selective_state_update, steps": PublicOp(selective_state_update, "selective_state_update", _state_update_steps),
    "mamba_chunk_scan_combined": PublicOp(mamba_chunk_scan_combined, "mamba_chunk_scan_combined", _ssd),
    "mamba3_scan": PublicOp(_mamba3_scan, "mamba3_scan", _mamba3),
    "mamba_split_conv1d_scan_combined": PublicOp(
        mamba_split_conv1d_scan_combined, "mamba_split_conv1d_scan_combined", _split_conv1d_scan
    ),
    "layer_norm_fn": PublicOp(layer_norm_fn, "layer_norm", _norm),
    "layer_norm_linear_fn": PublicOp(layer_norm_linear_fn, "layer_norm(_linear_fn)?", _norm_linear),
    "layernorm_fn": PublicOp(layernorm_fn, "layernorm_gated", _gated_norm),
    "swiglu": PublicOp(swiglu, "swiglu", lambda: {"xy": torch.randn(3, 8)}),
}
