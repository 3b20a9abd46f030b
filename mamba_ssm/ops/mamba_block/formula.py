"""A Mamba block's inside by one operator after another. From it the block's operators, for one direction of time and
for both, have double backward, forward mode and the derivatives of torch.func.
"""

from mamba_ssm._torch import derivatives, unpack
from mamba_ssm.ops.mamba_block.arguments import Inputs, Kept, Options
from mamba_ssm.ops.mamba_block.backward import mamba_inner_backward_op
from mamba_ssm.ops.mamba_block.both import (
    Backwards,
    Direction,
    KeptOfBoth,
    Shared,
    mamba_inner_both_backward_op,
    mamba_inner_both_op,
)
from mamba_ssm.ops.mamba_block.both import Wanted as WantedOfBoth
from mamba_ssm.ops.mamba_block.composed import pieces, project_out, scan
from mamba_ssm.ops.mamba_block.forward import Wanted, mamba_inner_op


def _inner(*arguments):
    """The operator's results, of which nothing is kept."""
    inputs, options, _ = unpack(arguments, Inputs, Options, Wanted)
    given = pieces(
        *inputs[:3],
        inputs.x_proj_weight,
        inputs.delta_proj_weight,
        inputs.A.shape[-1],
        inputs.B,
        inputs.C,
        *inputs[Inputs._fields.index("B_proj_bias") :],
        options.rms_eps,
        options.reverse,
    )
    y = scan(given, inputs.A, inputs.D, inputs.delta_bias, options.delta_softplus, options.reverse)
    return project_out(y.transpose(1, 2), inputs.out_proj_weight, inputs.out_proj_bias), None, None, None, None


def _inner_gradients(dout, *arguments):
    """The backward operator's results."""
    inputs, _, options = unpack(arguments, Inputs, Kept, Options)
    *others, reverse = options
    return tuple(derivatives.vjp(lambda *given: _inner(*given, *others, False, reverse)[:1], inputs, (dout,)))


def _both(*arguments):
    """The operator's results, of which nothing is kept."""
    shared, forwards, backwards, _ = unpack(arguments, Shared, Direction, Backwards, WantedOfBoth)
    y = None
    for own, reverse in ((forwards, False), (Direction(*backwards), True)):
        given = pieces(shared.xz, *own[:4], own.A.shape[-1], reverse=reverse)
        part = scan(given, own.A, own.D, own.delta_bias, True, reverse)
        y = part if y is None else y + part
    return project_out(y.transpose(1, 2), shared.out_proj_weight, shared.out_proj_bias), None, None, None, None


def _both_gradients(dout, *arguments):
    """The backward operator's results."""
    *given, _ = unpack(arguments, Shared, Direction, Backwards, KeptOfBoth)
    inputs = [tensor for record in given for tensor in record]
    return tuple(derivatives.vjp(lambda *given: _both(*given, False)[:1], inputs, (dout,)))


derivatives.extend(mamba_inner_op, _inner, of_operators=True)
derivatives.extend_backward(mamba_inner_backward_op, _inner_gradients)
derivatives.extend(mamba_inner_both_op, _both, of_operators=True)
derivatives.extend_backward(mamba_inner_both_backward_op, _both_gradients)
