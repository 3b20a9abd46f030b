"""A Mamba-2 block's inside by one operator after another. From it the block's operator has double backward, forward
mode and the derivatives of torch.func.
"""

import torch

from mamba_ssm._torch import derivatives, unpack
from mamba_ssm.ops.causal_conv1d import causal_conv1d_fn
from mamba_ssm.ops.mamba2_block.arguments import Inputs, Kept, Options
from mamba_ssm.ops.mamba2_block.backward import Wanted as WantedGradients
from mamba_ssm.ops.mamba2_block.backward import split_conv1d_scan_backward_op
from mamba_ssm.ops.mamba2_block.forward import Wanted, split_conv1d_scan_op
from mamba_ssm.ops.norm import rmsnorm_fn, swiglu
from mamba_ssm.ops.ssd import mamba_chunk_scan_combined


def _formula(*arguments):
    """The operator's results, of which nothing is kept."""
    inputs, options, wanted = unpack(arguments, Inputs, Options, Wanted)
    zxbcdt, A, dt_bias, ngroups = inputs.zxbcdt, inputs.A, inputs.dt_bias, options.ngroups
    heads, channels = (A.shape[0], options.headdim), inputs.conv1d_weight.shape[0]
    dim = heads[0] * heads[1]
    groups = ngroups, (channels - dim) // (2 * ngroups)
    d_mlp = (zxbcdt.shape[-1] - dim - channels - heads[0]) // 2
    mlp, z, xBC, dt = zxbcdt.split([2 * d_mlp, dim, channels, heads[0]], dim=-1)
    if options.A_is_log:
        A, dt_bias = -torch.exp(A.float()), None if dt_bias is None else dt_bias.float()
    parameters, activation = (inputs.conv1d_weight, inputs.conv1d_bias), "silu" if options.silu else None
    convolved = causal_conv1d_fn(
        xBC.transpose(1, 2), *parameters, inputs.seq_idx, activation=activation, reverse=options.reverse
    )
    x, B, C = convolved.transpose(1, 2).split([dim, groups[0] * groups[1], groups[0] * groups[1]], dim=-1)
    y, states = mamba_chunk_scan_combined(
        x.unflatten(-1, heads),
        dt,
        A,
        B.unflatten(-1, groups),
        C.unflatten(-1, groups),
        chunk_size=256,  # the kernels choose
        D=inputs.D,
        z=z.unflatten(-1, heads) if inputs.rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=inputs.initial_states,
        seq_idx=inputs.seq_idx,
        dt_softplus=True,
        dt_limit=(options.dt_min, options.dt_max),
        return_final_states=True,
        reverse=options.reverse,
    )
    out = y.flatten(2)
    if inputs.rmsnorm_weight is not None:
        eps, group_size = options.rmsnorm_eps, dim // ngroups
        out = rmsnorm_fn(out, inputs.rmsnorm_weight, None, z, eps, group_size, options.norm_before_gate)
    if d_mlp:
        out = torch.cat([swiglu(mlp), out], dim=-1)
    return out, None, None, states if wanted.return_final_states else None


def _gradients(dout, dfinal_states, *arguments):
    """The backward operator's results."""
    _, inputs, options, wanted = unpack(arguments, Kept, Inputs, Options, WantedGradients)
    *others, reverse = options

    def run(*given):
        out, _, _, states = _formula(*given, *others, dfinal_states is not None, False, reverse)
        return out, states

    grads = Inputs(*derivatives.vjp(run, inputs, (dout, dfinal_states)))
    grads = grads._replace(
        dt_bias=None if grads.dt_bias is None else grads.dt_bias.float(),
        A=grads.A.float(),
        initial_states=grads.initial_states if wanted.need_dinitial_states else None,
    )
    return *grads[:7], grads.rmsnorm_weight, run(*inputs)[0] if wanted.recompute_out else None


derivatives.extend(split_conv1d_scan_op, _formula, of_operators=True)
derivatives.extend_backward(split_conv1d_scan_backward_op, _gradients)
