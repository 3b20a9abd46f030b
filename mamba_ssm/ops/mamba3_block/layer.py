"""mamba3_layer: a Mamba-3 layer with its projections as one autograd node.

The projections are plain torch matrix products, so that compilers see them; what lies between is one operator,
mamba_ssm::mamba3_block.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import (
    autocast_dtype,
    call,
    call_below_autograd,
    call_in_backward,
    no_autocast,
    unpack_traced,
    wants_one_node,
)
from mamba_ssm.ops._shared.gradients import linear_gradients
from mamba_ssm.ops.block_node import Block, BlockNode
from mamba_ssm.ops.mamba3_block.block import mamba3_block_op
from mamba_ssm.ops.mamba3_block.block_arguments import Inputs, Options
from mamba_ssm.ops.mamba3_block.block_backward import Gradients, mamba3_block_backward_op
from mamba_ssm.ops.mamba3_scan.arguments import check_bounds_at_hand

_NO_STATES = (None,) * 4


class LayerInputs(typing.NamedTuple):
    """A layer's input and its parameters; those that mamba3_block takes are as there, of any float dtype."""

    hidden_states: torch.Tensor  # (B, L, d_model)
    in_proj_weight: torch.Tensor  # (2 H P + 2 R G N + 3 H + S, d_model)
    in_proj_bias: torch.Tensor | None
    out_proj_weight: torch.Tensor  # (d_model, H P)
    out_proj_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    B_weight: torch.Tensor
    C_weight: torch.Tensor
    B_bias: torch.Tensor
    C_bias: torch.Tensor
    D: torch.Tensor | None
    mimo_x: torch.Tensor | None
    mimo_z: torch.Tensor | None
    mimo_o: torch.Tensor | None
    norm_weight: torch.Tensor | None
    seq_idx: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def mamba3_layer(inputs: LayerInputs, options: Options) -> torch.Tensor:
    """A layer's output (B, L, d_model): in_proj, mamba3_block and out_proj, which keep what they would alone."""
    if inputs.cu_seqlens is not None:
        check_bounds_at_hand("Mamba3", inputs.hidden_states, inputs.cu_seqlens)
    if wants_one_node(inputs):
        return mamba3_node(inputs, options)
    return _by_operators(None, *inputs, *options)


def _by_operators(dtype, *arguments):
    """mamba3_layer by its operator's own node; dtype: cast to this one, as autocast would."""
    inputs, options = unpack_traced(arguments, LayerInputs, Options)
    projections = inputs[:5]
    if dtype is not None:
        projections = (checks.cast(tensor, dtype) for tensor in projections)
    hidden_states, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias = projections
    zxBCdt = F.linear(hidden_states, in_proj_weight, in_proj_bias)
    out, *_ = call(mamba3_block_op, *_inner(zxBCdt, inputs), *options, False)
    return F.linear(out.flatten(2), out_proj_weight, out_proj_bias)


def _inner(zxBCdt, inputs):
    """The operator's inputs from the layer's."""
    _, _, _, _, _, dt_bias, B_weight, C_weight, *others, seq_idx, cu_seqlens = inputs
    norms = checks.widen(dt_bias), B_weight, C_weight
    return Inputs(zxBCdt, *norms, *map(checks.widen, others), *_NO_STATES, seq_idx, cu_seqlens)


# ---- the node --------------------------------------------------------------------------------------------------------


def _forward(*arguments):
    *tensors, options, need = arguments
    inputs, need = LayerInputs(*tensors), LayerInputs(*need)
    projections, dtype = inputs[:5], autocast_dtype(inputs.hidden_states)
    if dtype is not None:
        projections = (checks.cast(tensor, dtype) for tensor in projections)
    hidden_states, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias = projections
    with no_autocast(hidden_states):
        inner = _inner(F.linear(hidden_states, in_proj_weight, in_proj_bias), inputs)
        y = call_below_autograd(mamba3_block_op, *inner, *options, False)[0].flatten(2)
        out = F.linear(y, out_proj_weight, out_proj_bias)
    kept = hidden_states if need.in_proj_weight else None, in_proj_weight if need.hidden_states else None
    return out, *kept, out_proj_weight, y if need.out_proj_weight else None, *inner


def _backward(dout, hidden_states, in_proj_weight, out_proj_weight, y, *arguments):
    *saved, options, need = arguments
    inner, options, need = Inputs(*saved), Options(*options), LayerInputs(*need)
    dy, *dout_proj = linear_gradients(dout, y, out_proj_weight, need.out_proj_bias, weight_dtype=need.out_proj_weight)
    batch, seqlen, width = dy.shape
    heads = width // options.headdim, options.headdim
    dy = dy.view(batch, seqlen, *(heads if inner.mimo_o is not None else (1, *heads)))
    grads = Gradients(*call_in_backward(mamba3_block_backward_op, dy, *_NO_STATES, *inner, *options))
    return LayerInputs(  # autograd takes each to its input's dtype
        *linear_gradients(
            grads.dzxBCdt, hidden_states, in_proj_weight, need.in_proj_bias, weight_dtype=need.in_proj_weight
        ),
        *dout_proj,
        *grads[1 : -len(_NO_STATES)],
        seq_idx=None,
        cu_seqlens=None,
    )


mamba3_node = BlockNode(Block("mamba3", _forward, _backward, _by_operators, len(LayerInputs._fields)))
