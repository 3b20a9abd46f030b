"""One decoding step of Mamba-3: the scan of one token, with the states updated in place."""

import typing

import torch

from mamba_ssm import _checks as checks
from mamba_ssm._native import abi
from mamba_ssm._native.launch import place, run
from mamba_ssm._torch import autocast_dtype, call, define, make, reference, signature, unpack, wrote_in_place
from mamba_ssm.ops.mamba3_scan.arguments import (
    NAME,
    STATE_NAMES,
    Inputs,
    Options,
    Out,
    States,
    check,
    fill,
    kernel_layout,
    new_like,
    out_shape,
    place_states,
)
from mamba_ssm.ops.mamba3_scan.reference import mamba3_scan_ref


@torch.no_grad()
def mamba3_step(
    states: States,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    ADT: torch.Tensor,
    DT: torch.Tensor,
    Trap: torch.Tensor,
    Q_bias: torch.Tensor,
    K_bias: torch.Tensor,
    Angles: torch.Tensor,
    D: torch.Tensor | None = None,
    Z: torch.Tensor | None = None,
    MIMO_V: torch.Tensor | None = None,
    MIMO_Z: torch.Tensor | None = None,
    MIMO_Out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    pairwise: bool = True,
) -> torch.Tensor:
    """One step: mamba3_scan's arguments without L, and states of any of its dtypes, which are updated in place.

    Returns out (B, H, P), without MIMO_Out (B, R, H, P). No gradient is recorded.
    """
    checks.check_tensor(NAME, "V", V)
    steps: dict[str, typing.Any] = {
        "Q": Q,
        "K": K,
        "V": V,
        "ADT": ADT,
        "DT": DT,
        "Trap": Trap,
        "Angles": Angles,
        "Z": Z,
    }
    for name, tensor in steps.items():
        if tensor is not None or name != "Z":
            checks.check_tensor(NAME, name, tensor)
            steps[name] = tensor.unsqueeze(1)
    if autocast_dtype(V) is not None:
        steps.update((name, checks.cast(steps[name], V.dtype)) for name in ("Q", "K", "Z"))
    Q, K, V, ADT, DT, Trap, Angles, Z = steps.values()
    biases = checks.widen(Q_bias), checks.widen(K_bias)
    parameters = map(checks.widen, (D, MIMO_V, MIMO_Z, MIMO_Out, norm_weight))
    D, MIMO_V, MIMO_Z, MIMO_Out, norm_weight = parameters
    tensors = Q, K, V, ADT, DT, Trap, *biases, Angles, D, Z, MIMO_V, MIMO_Z, MIMO_Out, norm_weight
    norm_eps = checks.check_number(NAME, "norm_eps", norm_eps)
    if reference.on:
        results: typing.Any = mamba3_scan_ref(*tensors, norm_eps, states, None, None, bool(pairwise), True)
        for state, final in zip(states, results[1], strict=True):
            state.copy_(final)
        return results[0].squeeze(1)
    arguments = *tensors, *states, None, None, bool(pairwise), norm_eps
    return call(mamba3_step_op, *arguments).squeeze(1)


# ---- operator --------------------------------------------------------------------------------------------------------


def _check(inputs):
    sizes = check(inputs, any_states=True)
    if sizes.seqlen != 1:
        raise ValueError(f"{NAME}: a step has a length of 1, got {sizes.seqlen}")
    for name in STATE_NAMES:
        state = getattr(inputs, name)
        if state is None:
            raise TypeError(f"{NAME}: {name} must be a torch.Tensor, got NoneType")
        checks.check_writable(NAME, name, state)
    return sizes


def _step(*arguments):
    inputs, options = unpack(arguments, Inputs, Options)
    sizes = _check(inputs)
    out = new_like(inputs.V, inputs, out_shape(sizes, inputs))
    if out.numel() == 0:
        return out
    states = inputs.states
    dense = [checks.contiguous(state) for state in states]
    stateless = make(Inputs, [None if name in STATE_NAMES else given for name, given in inputs._asdict().items()])
    _launch(sizes, kernel_layout(stateless), options, dense, out)
    for state, written in zip(states, dense, strict=True):
        if written is not state:
            state.copy_(written)
        wrote_in_place(state)
    return out


def _step_fake(*arguments):
    inputs, _ = unpack(arguments, Inputs, Options)
    return new_like(inputs.V, inputs, out_shape(_check(inputs), inputs))


def _launch(sizes, inputs, options, states, out):
    params = abi.MambaMamba3Step()
    functions = place(params, inputs.V)
    fill(params, sizes, inputs, options, Out(out))
    place_states(params, states)
    run(functions, "mamba3_step", params)


mamba3_step_op = define(
    f"mamba3_step({signature(Inputs, Options, written=STATE_NAMES)}) -> Tensor",
    _step,
    _step_fake,
    differentiable=False,
    called=NAME,
    planned=(),
)
