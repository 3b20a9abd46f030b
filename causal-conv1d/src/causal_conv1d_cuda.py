"""The compiled module of causal-conv1d, on mamba_ssm's kernels, for CUDA and CPU tensors.

Its functions have had other arguments in every version: the number of arguments tells which are meant.
"""

import typing

import torch

import causal_conv1d  # noqa: F401  (first: it sees to it that mamba_ssm's operators are found)
from mamba_ssm.ops.causal_conv1d.extension import Targets, backward, forward, update


def causal_conv1d_fwd(*arguments: typing.Any) -> torch.Tensor | None:
    """The output, or None where `out` is given.

    x, weight, bias, silu; or ..., seq_idx, silu; or ..., seq_idx, initial_states, final_states, silu;
    or ..., seq_idx, initial_states, out, final_states, silu.
    """
    seq_idx = initial_states = out = final_states = None
    match arguments:
        case x, weight, bias, silu:
            pass
        case x, weight, bias, seq_idx, silu:
            pass
        case x, weight, bias, seq_idx, initial_states, final_states, silu:
            pass
        case x, weight, bias, seq_idx, initial_states, out, final_states, silu:
            pass
        case _:
            raise _count("causal_conv1d_fwd", "4, 5, 7 or 8", arguments)
    result = forward(x, weight, bias, seq_idx, initial_states, out, final_states, silu)
    return result if out is None else None


def causal_conv1d_bwd(*arguments: typing.Any) -> list[torch.Tensor | None] | None:
    """[dx, dweight, dbias], with initial_states also dinitial_states; or None where all of them are given.

    x, weight, bias, dout, dx, silu; or ..., seq_idx, dx, silu;
    or ..., seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu;
    or ..., seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial_states, silu.
    """
    seq_idx = initial_states = dfinal_states = dweight = dbias = dinitial_states = None
    wanted = False
    match arguments:
        case x, weight, bias, dout, dx, silu:
            pass
        case x, weight, bias, dout, seq_idx, dx, silu:
            pass
        case x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, wanted, silu:
            pass
        case x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial_states, silu:
            wanted = dinitial_states is not None
        case _:
            raise _count("causal_conv1d_bwd", "6, 7, 10 or 12", arguments)
    targets = Targets(dx, dweight, dbias, dinitial_states)
    grads = backward(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, wanted, silu, targets)
    if len(arguments) == 12:
        return None
    return list(grads) if len(arguments) == 10 else list(grads[:3])


def causal_conv1d_update(*arguments: typing.Any) -> torch.Tensor | None:
    """The output, or None where `out` is given; conv_state is written in place.

    x, conv_state, weight, bias, silu; or ..., silu, cache_seqlens; or ..., silu, cache_seqlens, conv_state_indices;
    or x, conv_state, weight, bias, out, silu, cache_seqlens, conv_state_indices.
    """
    out = cache_seqlens = conv_state_indices = None
    match arguments:
        case x, conv_state, weight, bias, silu:
            pass
        case x, conv_state, weight, bias, silu, cache_seqlens:
            pass
        case x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices:
            pass
        case x, conv_state, weight, bias, out, silu, cache_seqlens, conv_state_indices:
            pass
        case _:
            raise _count("causal_conv1d_update", "5 to 8", arguments)
    result = update(x, conv_state, weight, bias, out, silu, cache_seqlens, conv_state_indices)
    return result if out is None else None


def _count(name, counts, arguments):
    return TypeError(f"{name} takes {counts} arguments, which tell what is meant, and got {len(arguments)}")
