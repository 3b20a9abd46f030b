"""mamba_block: a Mamba block from its input (hidden_states) on as one memory-saving autograd node.

Letters: B batch, D channels (d_inner), L length, N dstate, R rank of dt.
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
    refuse_second_derivatives,
    unpack_traced,
    wants_one_node,
)
from mamba_ssm.ops._shared.gradients import product
from mamba_ssm.ops.block_node import Block, BlockNode
from mamba_ssm.ops.carry import Neighbours
from mamba_ssm.ops.mamba_block.arguments import Before, Inputs, Kept, Options, check
from mamba_ssm.ops.mamba_block.backward import Gradients, gradients, mamba_inner_backward_op
from mamba_ssm.ops.mamba_block.forward import mamba_inner_fn, mamba_inner_op, scan_forward
from mamba_ssm.ops.mamba_block.projections import project_in, to_columns

_OPTIONS = Options(delta_softplus=True, rms_eps=0.0, checkpoint_lvl=1)
_PART_OPTIONS = _OPTIONS._replace(checkpoint_lvl=0)


class BlockInputs(typing.NamedTuple):
    """A block's input and a layer's parameters; those that mamba_inner_fn takes are as there."""

    hidden_states: torch.Tensor  # (B, L, d_model)
    in_proj_weight: torch.Tensor  # (2D, d_model)
    in_proj_bias: torch.Tensor | None  # (2D)
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    x_proj_weight: torch.Tensor
    dt_proj_weight: torch.Tensor
    out_proj_weight: torch.Tensor
    out_proj_bias: torch.Tensor | None
    A_log: torch.Tensor  # (D, N), where A = -exp(A_log); of any float dtype, as D and dt_bias
    D: torch.Tensor
    dt_bias: torch.Tensor


def mamba_block(inputs: BlockInputs) -> torch.Tensor:
    """A layer's output (B, L, d_model): mamba_inner_fn with the input projection in front.

    One autograd node, which keeps what the two would.
    """
    if wants_one_node(inputs):
        return mamba_node(inputs)
    xz = project_in(inputs.hidden_states, inputs.in_proj_weight, inputs.in_proj_bias)
    return mamba_inner_fn(
        xz,
        inputs.conv1d_weight,
        inputs.conv1d_bias,
        inputs.x_proj_weight,
        inputs.dt_proj_weight,
        inputs.out_proj_weight,
        inputs.out_proj_bias,
        -torch.exp(inputs.A_log.float()),
        D=inputs.D.float(),
        delta_bias=inputs.dt_bias.float(),
    )


def mamba_block_part(inputs: BlockInputs, neighbours: Neighbours) -> torch.Tensor:
    """mamba_block of a part of a sequence, (B, L, d_model), whose neighbouring parts lie elsewhere.

    The convolution's output and delta are kept for backward, not computed again.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        return _MambaBlockPart.apply(*inputs, neighbours)
    out, *_ = _part_forward(_project(inputs, neighbours)[2], False, neighbours)
    return out


def inner_inputs(xz, inputs, dtype):
    """The operator's inputs from the block's; dtype: autocast's, or None."""
    projections = inputs.x_proj_weight, inputs.dt_proj_weight, inputs.out_proj_weight
    if dtype is not None:
        projections = tuple(checks.cast(weight, dtype) for weight in projections)
    out_proj_bias = inputs.out_proj_bias
    x_proj_weight, dt_proj_weight, out_proj_weight = projections
    return Inputs(
        xz,
        inputs.conv1d_weight,
        inputs.conv1d_bias,
        x_proj_weight,
        dt_proj_weight,
        out_proj_weight,
        None if out_proj_bias is None else out_proj_bias.to(xz.dtype),
        A=-torch.exp(inputs.A_log.float()),
        B=None,
        C=None,
        D=inputs.D.float(),
        delta_bias=inputs.dt_bias.float(),
        B_proj_bias=None,
        C_proj_bias=None,
        b_rms_weight=None,
        c_rms_weight=None,
        dt_rms_weight=None,
    )


def block_gradients(grads, A, in_proj_weight, hidden_states, need):
    """The gradients under the names of a block's inputs, from those of the operator. in_proj_weight is None where the
    gradient of hidden_states is not wanted, and hidden_states where that of in_proj_weight is not. need: of each
    input whether its gradient is wanted, or in which dtype.
    """
    batch, _, seqlen = grads.dxz.shape
    dxz = to_columns(grads.dxz)
    dhidden_states = din_proj_weight = None
    if in_proj_weight is not None:
        dhidden_states = torch.mm(dxz.t(), in_proj_weight).view(batch, seqlen, in_proj_weight.shape[1])
    if hidden_states is not None:
        rows = hidden_states.reshape(batch * seqlen, hidden_states.shape[2])
        din_proj_weight = product(dxz, rows, need.in_proj_weight)
    return BlockInputs(  # autograd takes each to its input's dtype
        hidden_states=dhidden_states,
        in_proj_weight=din_proj_weight,
        in_proj_bias=dxz.sum(1) if need.in_proj_bias else None,
        conv1d_weight=grads.dconv1d_weight,
        conv1d_bias=grads.dconv1d_bias,
        x_proj_weight=grads.dx_proj_weight,
        dt_proj_weight=grads.ddelta_proj_weight,
        out_proj_weight=grads.dout_proj_weight,
        out_proj_bias=grads.dout_proj_bias,
        A_log=grads.dA * A,  # A = -exp(A_log) is its own derivative
        D=grads.dD,
        dt_bias=grads.ddelta_bias,
    )


def _project(inputs, neighbours):
    """hidden_states and in_proj's weight as they are multiplied, and the inputs of the operator."""
    hidden_states, in_proj_weight = inputs.hidden_states, inputs.in_proj_weight
    dtype = autocast_dtype(hidden_states)
    if dtype is not None:
        hidden_states, in_proj_weight = checks.cast(hidden_states, dtype), checks.cast(in_proj_weight, dtype)
    xz = project_in(hidden_states, in_proj_weight, inputs.in_proj_bias)
    if neighbours is not None:
        neighbours.send_inputs(xz[:, : xz.shape[1] // 2], inputs.conv1d_weight.shape[2] - 1)
    return hidden_states, in_proj_weight, inner_inputs(xz, inputs, dtype)


def _by_operators(dtype, *given):
    """The layer's output in dtype where a gradient of it is differentiated."""
    inputs = BlockInputs(*given)
    hidden_states, in_proj_weight = (checks.cast(tensor, dtype) for tensor in given[:2])
    inner = inner_inputs(project_in(hidden_states, in_proj_weight, inputs.in_proj_bias), inputs, dtype)
    *options, reverse = _OPTIONS
    return call(mamba_inner_op, *inner, *options, False, reverse)[0]


def _part_forward(inner, keep, neighbours):
    """The part's output, and with keep what backward starts from."""
    sizes = check(inner)
    with no_autocast(inner.xz):
        y, kept, before = scan_forward(inner.xz, inner, sizes, _PART_OPTIONS, keep, neighbours=neighbours)
        out = F.linear(y.t(), inner.out_proj_weight, inner.out_proj_bias)
    return out.view(sizes.batch, sizes.seqlen, sizes.d_model), *kept, *before


# ---- the node --------------------------------------------------------------------------------------------------------


def _forward(*arguments):
    *tensors, _, need = arguments
    inputs, need = BlockInputs(*tensors), BlockInputs(*need)
    hidden_states, in_proj_weight, inner = _project(inputs, None)
    *options, reverse = _OPTIONS
    out, *kept = call_below_autograd(mamba_inner_op, *inner, *options, True, reverse)
    return out, *_kept(hidden_states, in_proj_weight, need), *inner, *kept


def _kept(hidden_states, in_proj_weight, need):
    return hidden_states if need.in_proj_weight else None, in_proj_weight if need.hidden_states else None


def _backward(dout, hidden_states, in_proj_weight, *arguments):
    *saved, _, need = arguments
    inner, kept = unpack_traced(saved, Inputs, Kept)
    grads = Gradients(*call_in_backward(mamba_inner_backward_op, dout, *inner, *kept, *_OPTIONS))
    return block_gradients(grads, inner.A, in_proj_weight, hidden_states, BlockInputs(*need))


mamba_node = BlockNode(Block("mamba", _forward, _backward, _by_operators, len(BlockInputs._fields)))


class _MambaBlockPart(torch.autograd.Function):
    """The same of a part of a sequence."""

    @staticmethod
    def forward(ctx, *arguments):
        *given, ctx.neighbours = arguments
        (need,) = unpack_traced(ctx.needs_input_grad, BlockInputs)
        hidden_states, in_proj_weight, inner = _project(BlockInputs(*given), ctx.neighbours)
        out, *kept = _part_forward(inner, True, ctx.neighbours)
        ctx.save_for_backward(*_kept(hidden_states, in_proj_weight, need), *inner, *kept)
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives("a gradient under context parallel")
        hidden_states, in_proj_weight, *saved = ctx.saved_tensors
        inner, kept, before = unpack_traced(saved, Inputs, Kept, Before)
        (need,) = unpack_traced(ctx.needs_input_grad, BlockInputs)
        with no_autocast(dout):  # everything has forward's dtype already, whatever is on now
            grads = gradients(dout, inner, kept, _PART_OPTIONS, check(inner), ctx.neighbours, before)
            grads = block_gradients(grads, inner.A, in_proj_weight, hidden_states, need)
        return *grads, None  # of neighbours
