"""A call of each operator and node that has plans, for the tests of these."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mamba_ssm import Mamba, Mamba2, Mamba3
from mamba_ssm._torch import dispatch
from mamba_ssm.modules.block import Block
from mamba_ssm.ops.block_node import IN_A_ROW
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.linear import linear, normed_linear, quantize_weight, quantized_linear, takes_norm
from mamba_ssm.ops.linear_cross_entropy import linear_cross_entropy
from mamba_ssm.ops.mamba2_block import mamba_split_conv1d_scan_combined
from mamba_ssm.ops.mamba2_step import mamba2_step
from mamba_ssm.ops.mamba3_block import mamba3_block
from mamba_ssm.ops.mamba3_block.step import mamba3_block_step
from mamba_ssm.ops.mamba3_scan.forward import mamba3_scan
from mamba_ssm.ops.mamba3_scan.step import mamba3_step
from mamba_ssm.ops.mamba_block import mamba_inner_fn
from mamba_ssm.ops.mamba_step import mamba_step
from mamba_ssm.ops.norm import RMSNorm, rms_norm_fn, rmsnorm_fn, swiglu
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined
from mamba_ssm.ops.ssd.varlen import ssd_varlen_states_op
from mamba_ssm.ops.state_update import selective_state_update

B, D, L, N, H, P, G, W, R, S = 2, 8, 5, 4, 2, 4, 1, 4, 2, 2
I = H * P + 2 * G * N  # noqa: E741
M2, M3 = 2 * H * P + 2 * G * N + H, 2 * H * P + 2 * R * G * N + 3 * H + S
STATES = {"angle": (B, H, S), "ssm": (B, H, P, N), "k": (B, R, H, N), "v": (B, H, P)}


class Call(NamedTuple):
    """A function, the operators that it calls, and the shapes of its tensors."""

    function: Callable[..., Any]
    operators: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    differentiable: bool = False


def with_states(function):
    return lambda angle, ssm, k, v, **given: function(states=(angle, ssm, k, v), **given)


def packed_states(x, dt, A, B, C):
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32, device=x.device)
    options = True, 0.0, float("inf")
    return dispatch.call(ssd_varlen_states_op, x, dt, A, B, C, None, None, bounds, *options)


def after_norm(x, residual, norm_weight, weight):
    """An int8 layer, which takes the norm on GPUs alone and without gradients."""
    weight, scales = quantize_weight(weight)
    if takes_norm(x, residual, norm_weight, weight):
        return normed_linear(x, residual, norm_weight, weight, scales, None, 1e-5)
    normed, total = rms_norm_fn(x, norm_weight, None, residual=residual, prenorm=True)
    return quantized_linear(normed, weight, scales, None), total


def block(kind, **sizes):
    def function(x):
        torch.manual_seed(0)
        return kind(D, d_state=N, device=x.device, **sizes)(x)

    return function


def layer(kind, **sizes):
    """As the second one of a language model, whose norm is part of its node."""
    return lambda x, residual: block_of(kind, x.device, **sizes)(x, residual)


def layers(kind, **sizes):
    """As in a language model, as many as are one node."""
    return lambda x, residual: in_a_row([block_of(kind, x.device, **sizes) for _ in range(IN_A_ROW)], x, residual)


def in_a_row(blocks, x, residual):
    """What the last block gives: as one node of them all if they can be, else by calls."""
    row = [block.as_layer(x, residual) for block in blocks]
    if None not in row:
        return row[0].node.of_layers(x, residual, row)
    for block in blocks:
        x, residual = block(x, residual)
    return x, residual


def block_of(kind, device, **sizes):
    torch.manual_seed(0)
    mixer = partial(kind, d_state=N, device=device, **sizes)
    return Block(D, mixer, nn.Identity, partial(RMSNorm, device=device), fused_add_norm=True)


def both(name):
    return name, f"{name}_backward"


_STEP = {"x": (B, H, P), "dt": (B, H, P), "A": (H, P, N), "B": (B, G, N), "C": (B, G, N), "D": (H, P), "z": (B, H, P)}
_SSD = {"x": (B, L, H, P), "dt": (B, L, H), "A": (H,), "B": (B, L, G, N), "C": (B, L, G, N)}
_MIMO = {"D": (H,), "MIMO_V": (H, R, P), "MIMO_Z": (H, R, P), "MIMO_Out": (H, R, P)}
_QKV = {"Q": (R, G, N), "K": (R, G, N), "V": (H, P), "ADT": (H,), "DT": (H,), "Trap": (H,), "Angles": (S,), "Z": (H, P)}
_BIASES = {"Q_bias": (H, R, N), "K_bias": (H, R, N)}
_STREAM = {"x": (B, L, D), "residual": (B, L, D)}
CALLS = {
    "selective_scan": Call(
        lambda **given: selective_scan_fn(**given, delta_softplus=True),
        both("selective_scan"),
        {"u": (B, D, L), "delta": (B, D, L), "A": (D, N), "B": (B, N, L), "C": (B, N, L), "D": (D,), "z": (B, D, L)}
        | {"delta_bias": (D,)},
        True,
    ),
    "ssd": Call(
        lambda **given: mamba_chunk_scan_combined(**given, chunk_size=64, dt_softplus=True, return_final_states=True),
        both("ssd"),
        _SSD | {"D": (H,), "dt_bias": (H,), "initial_states": (B, H, P, N)},
        True,
    ),
    "ssd_varlen_states": Call(
        packed_states,
        ("ssd_varlen_states",),
        {name: (1, *shape[1:]) if shape[0] == B and name != "A" else shape for name, shape in _SSD.items()},
    ),
    "causal_conv1d": Call(
        lambda **given: causal_conv1d_fn(**given, activation="silu"),
        both("causal_conv1d"),
        {"x": (B, D, L), "weight": (D, W), "bias": (D,)},
        True,
    ),
    "causal_conv1d_update": Call(
        lambda **given: causal_conv1d_update(**given, activation="silu"),
        ("causal_conv1d_update",),
        {"x": (B, D), "conv_state": (B, D, W), "weight": (D, W), "bias": (D,)},
    ),
    "selective_state_update": Call(
        lambda **given: selective_state_update(**given, dt_softplus=True),
        ("selective_state_update",),
        {"state": (B, H, P, N)} | _STEP | {"dt_bias": (H, P)},
    ),
    "selective_state_update, several": Call(
        selective_state_update,
        ("selective_state_update_to",),
        {"state": (B, D, N), "x": (B, L, D), "dt": (B, L, D), "A": (D, N), "B": (B, L, N), "C": (B, L, N)}
        | {"intermediate_states_buffer": (B, L, D, N)},
    ),
    "mamba_step": Call(
        mamba_step,
        ("mamba_step",),
        {"xz": (B, 2 * D), "conv_state": (B, D, W), "ssm_state": (B, D, N), "conv1d_weight": (D, W)}
        | {"conv1d_bias": (D,), "x_proj_weight": (R + 2 * N, D), "dt_proj_weight": (D, R), "dt_bias": (D,)}
        | {"A_log": (D, N), "D": (D,)},
    ),
    "mamba2_step": Call(
        mamba2_step,
        ("mamba2_step",),
        {"zxbcdt": (B, M2), "conv_state": (B, I, W), "ssm_state": (B, H, P, N), "conv1d_weight": (I, W)}
        | {"conv1d_bias": (I,), "dt_bias": (H,), "A_log": (H,), "D": (H,), "rmsnorm_weight": (H * P,)},
    ),
    "mamba3_block_step": Call(
        with_states(mamba3_block_step),
        ("mamba3_block_step",),
        STATES
        | {"zxBCdt": (B, M3), "dt_bias": (H,), "B_weight": (N,), "C_weight": (N,), "B_bias": (H, R, N)}
        | {"C_bias": (H, R, N), "D": (H,), "mimo_x": (H, R, P), "mimo_z": (H, R, P), "mimo_o": (H, R, P)},
    ),
    "mamba3_step": Call(
        with_states(mamba3_step),
        ("mamba3_step",),
        STATES | {name: (B, *shape) for name, shape in _QKV.items()} | _BIASES | _MIMO,
    ),
    "mamba3_scan": Call(
        mamba3_scan,
        both("mamba3_scan"),
        {name: (B, L, *shape) for name, shape in _QKV.items()} | _BIASES | _MIMO,
        True,
    ),
    "rms_norm_fn": Call(
        lambda **given: rms_norm_fn(**given, prenorm=True),
        both("add_norm"),
        {"x": (B, L, D), "weight": (D,), "bias": (D,), "residual": (B, L, D)},
        True,
    ),
    "rmsnorm_fn": Call(
        rmsnorm_fn, both("gated_norm"), {"x": (B, L, D), "weight": (D,), "bias": (D,), "z": (B, L, D)}, True
    ),
    "mamba_inner_fn": Call(
        mamba_inner_fn,
        both("mamba_inner"),
        {"xz": (B, 2 * D, L), "conv1d_weight": (D, 1, W), "conv1d_bias": (D,), "x_proj_weight": (R + 2 * N, D)}
        | {"delta_proj_weight": (D, R), "out_proj_weight": (D, D), "out_proj_bias": (D,), "A": (D, N)},
        True,
    ),
    "mamba_split_conv1d_scan_combined": Call(
        lambda **given: mamba_split_conv1d_scan_combined(**given, chunk_size=64, headdim=P),
        both("split_conv1d_scan"),
        {"zxbcdt": (B, L, M2), "conv1d_weight": (I, W), "conv1d_bias": (I,), "dt_bias": (H,), "A": (H,), "D": (H,)}
        | {"rmsnorm_weight": (H * P,)},
        True,
    ),
    "mamba3_block": Call(
        lambda **given: mamba3_block(**given, headdim=P),
        both("mamba3_block"),
        {"zxBCdt": (B, L, M3), "dt_bias": (H,), "B_weight": (N,), "C_weight": (N,), "B_bias": (H, R, N)}
        | {"C_bias": (H, R, N), "D": (H,), "mimo_x": (H, R, P), "mimo_z": (H, R, P), "mimo_o": (H, R, P)},
        True,
    ),
    "Mamba": Call(block(Mamba), both("mamba_node"), {"x": (B, L, D)}, True),
    "Mamba2": Call(block(Mamba2, headdim=8), both("mamba2_node"), {"x": (B, L, D)}, True),
    "Mamba3": Call(block(Mamba3, headdim=8), both("mamba3_node"), {"x": (B, L, D)}, True),
    "Mamba, layer": Call(layer(Mamba), both("mamba_layer_node"), _STREAM, True),
    "Mamba2, layer": Call(layer(Mamba2, headdim=8), both("mamba2_layer_node"), _STREAM, True),
    "Mamba3, layer": Call(layer(Mamba3, headdim=8), both("mamba3_layer_node"), _STREAM, True),
    "Mamba, layers": Call(layers(Mamba), both(f"mamba_{IN_A_ROW}_layers_node"), _STREAM, True),
    "Mamba2, layers": Call(layers(Mamba2, headdim=8), both(f"mamba2_{IN_A_ROW}_layers_node"), _STREAM, True),
    "Mamba3, layers": Call(layers(Mamba3, headdim=8), both(f"mamba3_{IN_A_ROW}_layers_node"), _STREAM, True),
    "swiglu": Call(swiglu, both("swiglu"), {"xy": (B, L, 2 * D)}, True),
    "linear_cross_entropy": Call(
        lambda hidden_states, weight: linear_cross_entropy(
            hidden_states, weight, torch.arange(B * L, device=weight.device).view(B, L) % N, ignore_index=1
        ),
        ("linear_cross_entropy",),
        {"hidden_states": (B, L, D), "weight": (N, D)},
        True,
    ),
    "linear": Call(linear, ("linear",), {"x": (B, D), "weight": (N, D), "bias": (N,)}),
    "normed_linear": Call(
        after_norm, ("normed_linear",), {"x": (1, 32), "residual": (1, 32), "norm_weight": (32,), "weight": (D, 32)}
    ),
}
