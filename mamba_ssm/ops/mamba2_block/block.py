"""mamba2_block: a Mamba-2 block from its input (hidden_states) on as one memory-saving autograd node.

The projections are plain torch matrix products, so that compilers see them; what lies between is one operator,
mamba_ssm::split_conv1d_scan.
Letters: B batch, L length, H heads, P headdim, G groups of B and C, N dstate.
"""

import typing

import torch
import torch.nn.functional as F

from mamba_ssm import _checks as checks
from mamba_ssm._torch import (
    autocast_dtype,
    call,
    call_below_autograd,
    no_autocast,
    unpack_traced,
    wants_one_node,
)
from mamba_ssm.ops._shared.gradients import linear_gradients
from mamba_ssm.ops.block_node import Block, BlockNode
from mamba_ssm.ops.mamba2_block.arguments import Inputs, Options
from mamba_ssm.ops.mamba2_block.forward import inner_gradients, split_conv1d_scan_op


class BlockInputs(typing.NamedTuple):
    """A block's input and a layer's parameters; those that mamba_split_conv1d_scan_combined takes are as there."""

    hidden_states: torch.Tensor  # (B, L, d_model)
    in_proj_weight: torch.Tensor  # (2 d_mlp + 2 H P + 2 G N + H, d_model)
    in_proj_bias: torch.Tensor | None
    outproj_weight: torch.Tensor
    outproj_bias: torch.Tensor | None
    conv1d_weight: torch.Tensor  # (H P + 2 G N, 1, W)
    conv1d_bias: torch.Tensor | None
    dt_bias: torch.Tensor  # of any float dtype, as A_log
    A_log: torch.Tensor  # (H), where A = -exp(A_log)
    D: torch.Tensor
    seq_idx: torch.Tensor | None
    rmsnorm_weight: torch.Tensor | None


def mamba2_block(inputs: BlockInputs, options: Options) -> torch.Tensor:
    """A layer's output (B, L, d_model): mamba_split_conv1d_scan_combined with the input projection in front.

    options: with A_is_log=True. One autograd node, which keeps what the two would.
    """
    if wants_one_node(inputs):
        return mamba2_node(inputs, options)
    return _by_operators(None, *inputs, *options)


def _by_operators(dtype, *arguments):
    """mamba2_block by its operator's own node; dtype: cast to this one, as autocast would."""
    inputs, options = unpack_traced(arguments, BlockInputs, Options)
    given = inputs.hidden_states, inputs.in_proj_weight, inputs.in_proj_bias, inputs.outproj_weight
    if dtype is not None:
        given = (checks.cast(tensor, dtype) for tensor in given)
    hidden_states, in_proj_weight, in_proj_bias, outproj_weight = given
    zxbcdt = F.linear(hidden_states, in_proj_weight, in_proj_bias)
    *others, reverse = options
    out, _, _, _ = call(split_conv1d_scan_op, *_inner(zxbcdt, inputs), *others, False, False, reverse)
    return F.linear(out, outproj_weight, _bias_of(inputs.outproj_bias, out))


def _inner(zxbcdt, inputs):
    """The operator's inputs from the block's."""
    return Inputs(
        zxbcdt,
        inputs.conv1d_weight.squeeze(1),
        inputs.conv1d_bias,
        _readable(inputs.dt_bias),
        _readable(inputs.A_log),
        inputs.D if inputs.D.dtype == torch.float32 else inputs.D.float(),
        None,
        inputs.seq_idx,
        inputs.rmsnorm_weight,
    )


def _readable(parameter):
    """In a dtype that kernels read: float64 as float32."""
    return parameter.float() if parameter.dtype == torch.float64 else parameter


def _bias_of(bias, like):
    return None if bias is None else checks.cast(bias, like.dtype)


# ---- the node --------------------------------------------------------------------------------------------------------


def _forward(*arguments):
    *tensors, options, need = arguments
    inputs, need = BlockInputs(*tensors), BlockInputs(*need)
    hidden_states, in_proj_weight, in_proj_bias = inputs.hidden_states, inputs.in_proj_weight, inputs.in_proj_bias
    outproj_weight, dtype = inputs.outproj_weight, autocast_dtype(hidden_states)
    if dtype is not None:
        hidden_states, in_proj_weight, in_proj_bias, outproj_weight = (
            checks.cast(tensor, dtype) for tensor in (hidden_states, in_proj_weight, in_proj_bias, outproj_weight)
        )
    with no_autocast(hidden_states):
        inner = _inner(F.linear(hidden_states, in_proj_weight, in_proj_bias), inputs)
        *options, reverse = options
        gated, y, rstd, _ = call_below_autograd(split_conv1d_scan_op, *inner, *options, False, True, reverse)
        out = F.linear(gated, outproj_weight, _bias_of(inputs.outproj_bias, gated))
    kept = hidden_states if need.in_proj_weight else None, in_proj_weight if need.hidden_states else None
    return out, *kept, outproj_weight, y, rstd, *inner


def _backward(dout, hidden_states, in_proj_weight, outproj_weight, *arguments):
    *saved, options, need = arguments
    need = BlockInputs(*need)
    need_out_proj = need.outproj_weight, need.outproj_bias
    *dout_proj, inner = inner_gradients(
        dout, None, outproj_weight, saved, options, *need_out_proj, need_initial_states=False
    )
    return BlockInputs(  # autograd takes each to its input's dtype
        *linear_gradients(
            inner.zxbcdt, hidden_states, in_proj_weight, need.in_proj_bias, weight_dtype=need.in_proj_weight
        ),
        *dout_proj,
        inner.conv1d_weight.unsqueeze(1),
        inner.conv1d_bias,
        inner.dt_bias,
        inner.A,  # the operator took A_log
        inner.D,
        None,
        inner.rmsnorm_weight,
    )


mamba2_node = BlockNode(Block("mamba2", _forward, _backward, _by_operators, len(BlockInputs._fields)))
